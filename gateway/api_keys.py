"""API keys, one per line of a file."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence
from pathlib import Path

from outrider.errors import ConfigError, UnauthenticatedError


class ApiKeys:
    """Checks "Authorization: Bearer KEY". Without keys, everyone may enter."""

    def __init__(self, keys: Sequence[str] = ()) -> None:
        self._keys = [key.encode() for key in keys]

    @classmethod
    def load(cls, path: str | None) -> ApiKeys:
        """Read keys from a file, without empty lines and lines that begin with #.

        Raises `ConfigError` for a file that cannot be read or holds no key: it must never open
        the door.
        """
        if path is None:
            return cls()
        try:
            lines = Path(path).read_text(encoding="utf-8").splitlines()
        except (OSError, ValueError) as error:
            raise ConfigError(f"The API key file {path} cannot be read: {error}") from error
        keys = [line.strip() for line in lines if line.strip() and not line.startswith("#")]
        if not keys:
            raise ConfigError(f"The API key file {path} holds no key.")
        return cls(keys)

    def check(self, authorization: str | None) -> str:
        """Return the tenant: a hash of the key, the same at every gateway; "" without keys.

        Raises `UnauthenticatedError`. Takes the same time whichever key nearly fits.
        """
        if not self._keys:
            return ""
        scheme, _, given = (authorization or "").partition(" ")
        fits = [hmac.compare_digest(given.strip().encode(), key) for key in self._keys]
        if scheme.lower() != "bearer" or not any(fits):
            raise UnauthenticatedError(
                "No valid API key. Send one in the header 'Authorization: Bearer KEY', or over "
                "HTTP in x-api-key."
            )
        return hashlib.sha256(given.strip().encode()).hexdigest()[:32]
