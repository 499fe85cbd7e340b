"""Credentials from PEM files that may be replaced while the process runs."""

from __future__ import annotations

import logging
import os
import ssl
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Generic, TypeVar

import grpc

from outrider.errors import ConfigError
from outrider.rpc.deployment import TlsFiles

_log = logging.getLogger(__name__)

T = TypeVar("T")
Stamp = tuple[tuple[int, int, int], ...]


def stamp(files: TlsFiles) -> Stamp:
    """Return a value that changes when a file is written or replaced, also by a link.

    Raises `ConfigError` while a file is missing.
    """
    try:
        stats = [os.stat(path) for path in files.paths]
    except OSError as error:
        raise ConfigError(f"cannot read {error.filename}: {error.strerror}.") from error
    return tuple((stat.st_ino, stat.st_mtime_ns, stat.st_size) for stat in stats)


def channel_credentials(files: TlsFiles) -> grpc.ChannelCredentials:
    """Return the current credentials of a client. Raises `ConfigError`."""
    key, cert, ca = _read(files)
    return grpc.ssl_channel_credentials(ca, key, cert)


def server_credentials(files: TlsFiles) -> grpc.ServerCredentials:
    """Return credentials of a server that read changed files at each handshake.

    With `files.ca`, clients must show a certificate that it signed. Raises `ConfigError`.
    """
    follower = Follower(files, _configuration)
    return grpc.dynamic_ssl_server_credentials(
        follower.latest,
        follower.fetch,  # type: ignore[arg-type]  # None is allowed, and usual
        require_client_authentication=files.ca is not None,
    )


def client_context(files: TlsFiles) -> ssl.SSLContext:
    """Return the current context of a client without gRPC. Raises `ConfigError`."""
    if files.ca is None:
        context = ssl.create_default_context()
    else:  # no other authority
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    _load_chain(context, files)
    return context


def server_context(files: TlsFiles) -> ssl.SSLContext:
    """Return the current context of a server without gRPC. Raises `ConfigError`.

    With `files.ca`, clients must show a certificate that it signed.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.verify_mode = ssl.CERT_NONE if files.ca is None else ssl.CERT_REQUIRED
    _load_chain(context, files)
    return context


def _load_chain(context: ssl.SSLContext, files: TlsFiles) -> None:
    """Load the files into a new context. Raises `ConfigError`."""
    try:
        context.load_cert_chain(files.cert, files.key, password="")  # does not ask a terminal
        if files.ca is not None:
            context.load_verify_locations(files.ca)
    except ssl.SSLError as error:
        raise ConfigError(
            f"{', '.join(files.paths)}: this is not a certificate, its key without a password and, "
            f"if given, an authority's certificate ({error})."
        ) from error
    except OSError as error:
        raise ConfigError(f"cannot read {error.filename}: {error.strerror}.") from error


class Follower(Generic[T]):
    """The result of `load`, renewed when the files change. Thread-safe.

    The constructor raises `ConfigError`.
    """

    def __init__(self, files: TlsFiles, load: Callable[[TlsFiles], T]) -> None:
        self._files = files
        self._load = load
        self._lock = threading.Lock()
        self._stamp = stamp(files)
        self.latest = load(files)

    def fetch(self) -> T | None:
        """Return the new result if the files have changed since the last call, else None."""
        with self._lock:
            try:
                now = stamp(self._files)
                if now == self._stamp:
                    return None
                loaded = self._load(self._files)
                if stamp(self._files) != now:  # being replaced until the next handshake
                    return None
            except ConfigError as error:
                _log.warning("keeping the former certificate: %s", error)
                return None
            self._stamp, self.latest = now, loaded
        _log.info("using the certificate that was put into %s", self._files.cert)
        return loaded


def _configuration(files: TlsFiles) -> grpc.ServerCertificateConfiguration:
    key, cert, ca = _read(files)
    return grpc.ssl_server_certificate_configuration([(key, cert)], ca)


def _read(files: TlsFiles) -> tuple[bytes, bytes, bytes | None]:
    """Return key, certificate and authority, checked, since gRPC's errors give no reason."""
    _load_chain(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), files)
    try:
        ca = None if files.ca is None else Path(files.ca).read_bytes()
        return Path(files.key).read_bytes(), Path(files.cert).read_bytes(), ca
    except OSError as error:
        raise ConfigError(f"cannot read {error.filename}: {error.strerror}.") from error
