"""Credentials from PEM files that may be replaced while the process runs: gRPC's, and ours."""

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
    """Change when a file is written or replaced, also by Kubernetes' exchange of a link.

    Raises `OSError` while one is missing.
    """
    stats = [os.stat(path) for path in files.paths]
    return tuple((stat.st_ino, stat.st_mtime_ns, stat.st_size) for stat in stats)


def channel_credentials(files: TlsFiles) -> grpc.ChannelCredentials:
    """What the files hold now. Raises `ConfigError`."""
    key, cert, ca = _read(files)
    return grpc.ssl_channel_credentials(ca, key, cert)


def server_credentials(files: TlsFiles) -> grpc.ServerCredentials:
    """Credentials that follow the files: each handshake uses what they hold then.

    With `files.ca`, clients must show a certificate that it signed. Raises `ConfigError`.
    """
    follower = Follower(files, _configuration)
    return grpc.dynamic_ssl_server_credentials(
        follower.latest,
        follower.fetch,  # type: ignore[arg-type]  # None is allowed, and usual
        require_client_authentication=files.ca is not None,
    )


def client_context(files: TlsFiles) -> ssl.SSLContext:
    """For a connection without gRPC: what the files hold now. Raises `ConfigError`."""
    if files.ca is None:
        context = ssl.create_default_context()
    else:  # that authority and no other
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    _load_chain(context, files)
    return context


def server_context(files: TlsFiles) -> ssl.SSLContext:
    """The same for a port. With `files.ca`, clients must show a certificate that it signed.

    Raises `ConfigError`.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.verify_mode = ssl.CERT_NONE if files.ca is None else ssl.CERT_REQUIRED
    _load_chain(context, files)
    return context


def _load_chain(context: ssl.SSLContext, files: TlsFiles) -> None:
    """Give a new context what the files hold. Raises `ConfigError`."""
    try:
        context.load_cert_chain(files.cert, files.key, password="")  # asks no terminal for one
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
    """What `load` makes of the files, asked at the start of every handshake, on any thread.

    Building it raises `ConfigError`.
    """

    def __init__(self, files: TlsFiles, load: Callable[[TlsFiles], T]) -> None:
        self._files = files
        self._load = load
        self._lock = threading.Lock()
        self._stamp = stamp(files)
        self.latest = load(files)

    def fetch(self) -> T | None:
        """What is the latest now, or None if that has not changed."""
        with self._lock:
            try:
                now = stamp(self._files)
                if now == self._stamp:
                    return None
                loaded = self._load(self._files)
                if stamp(self._files) != now:  # being replaced: whole at the next handshake
                    return None
            except (OSError, ConfigError) as error:
                _log.warning("keeping the former certificate: %s", error)
                return None
            self._stamp, self.latest = now, loaded
        _log.info("using the certificate that was put into %s", self._files.cert)
        return loaded


def _configuration(files: TlsFiles) -> grpc.ServerCertificateConfiguration:
    key, cert, ca = _read(files)
    return grpc.ssl_server_certificate_configuration([(key, cert)], ca)


def _read(files: TlsFiles) -> tuple[bytes, bytes, bytes | None]:
    """Key, certificate, authority, if they are that: gRPC fails later and does not say why."""
    _load_chain(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), files)
    try:
        ca = None if files.ca is None else Path(files.ca).read_bytes()
        return Path(files.key).read_bytes(), Path(files.cert).read_bytes(), ca
    except OSError as error:
        raise ConfigError(f"cannot read {error.filename}: {error.strerror}.") from error
