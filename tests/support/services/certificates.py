"""Certificates made for a test, in files as Kubernetes mounts them."""

from __future__ import annotations

from pathlib import Path

import trustme

from outrider.rpc.deployment import TlsFiles


class Issuer:
    """A certificate authority of one test."""

    def __init__(self) -> None:
        self._ca = trustme.CA()

    def write(self, folder: Path, *names: str) -> TlsFiles:
        """A certificate for `names`, its key and the authority's certificate, in `folder`."""
        folder.mkdir(exist_ok=True)
        issued = self._ca.issue_cert(*names)
        files = {
            "tls.crt": issued.cert_chain_pems[0].bytes(),
            "tls.key": issued.private_key_pem.bytes(),
            "ca.crt": self._ca.cert_pem.bytes(),
        }
        for name, content in files.items():
            (folder / name).write_bytes(content)
        return TlsFiles(str(folder / "tls.crt"), str(folder / "tls.key"), str(folder / "ca.crt"))


def flags(files: TlsFiles) -> tuple[str, ...]:
    """The command line flags that name them."""
    assert files.ca is not None
    return ("--tls-cert", files.cert, "--tls-key", files.key, "--tls-ca", files.ca)
