"""Serves /metrics in Prometheus' text format or as OpenMetrics.

`prometheus_client.start_http_server` (0.26) turns the colons of metric names into underscores in
OpenMetrics, the only format with exemplars.
"""

from __future__ import annotations

import socket
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import prometheus_client
from prometheus_client import CollectorRegistry, openmetrics
from prometheus_client.openmetrics.exposition import ALLOWUTF8

from outrider.errors import ConfigError
from outrider.rpc.targets import join_address

_OPENMETRICS = "application/openmetrics-text"


def encode(registry: CollectorRegistry, accept: str) -> tuple[bytes, str]:
    """Return the metrics and their content type, in the format of an Accept header."""
    if _OPENMETRICS in accept:
        # The other escapings change names.
        text = openmetrics.exposition.generate_latest(registry, escaping=ALLOWUTF8)  # type: ignore[no-untyped-call]
        return text, openmetrics.exposition.CONTENT_TYPE_LATEST
    return prometheus_client.generate_latest(registry), prometheus_client.CONTENT_TYPE_LATEST


class MetricsServer:
    """Answers GET /metrics from threads of its own. Raises `ConfigError` for a taken port.

    Other processes may serve a port that is shared, as `GrpcServer`'s.
    """

    def __init__(
        self, host: str, port: int, registry: CollectorRegistry, *, share_port: bool = False
    ) -> None:
        class Handler(BaseHTTPRequestHandler):
            timeout = 10  # seconds that a silent client keeps a thread

            def do_GET(self) -> None:
                text, content_type = encode(registry, self.headers.get("Accept", ""))
                self.send_response(200)
                self.send_header("Content-Type", content_type)
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                self.wfile.write(text)

            def log_message(self, *_: object) -> None:
                """Log no scrapes."""

        class Server(ThreadingHTTPServer):
            address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
            allow_reuse_port = share_port

        try:
            self._server = Server((host, port), Handler)
        except OSError as error:
            raise ConfigError(
                f"cannot serve metrics on {join_address(host, port)}: {error.strerror or error}. "
                "Choose another port, or 0 for a free one."
            ) from error
        self._thread = threading.Thread(
            target=self._server.serve_forever, name="metrics", daemon=True
        )
        self._thread.start()
        self.url = f"http://{join_address(host, self._server.server_port)}/metrics"

    def close(self) -> None:
        """Stop listening."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(timeout=2)
