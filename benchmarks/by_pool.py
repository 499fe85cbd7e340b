"""A scorer as of fixed_k.py, whose requests choose among its proposers. For benchmarks only.

    python -m benchmarks.by_pool scorer_service|proposer_service|gateway [the service's flags]

A request's tenant names the pool that drafts for it; without one any does. So several ways between
scorer and proposer are compared on one engine.
"""

from __future__ import annotations

from unittest import mock

from benchmarks.fixed_k import fix
from benchmarks.wrapped import serve
from outrider.rpc import runtime


def change(service: str) -> None:
    """Of a scorer alone."""
    if service != "scorer_service":
        return
    fix()
    runtime.prepare_grpc()  # which the next imports
    from scorer_service.drafting.attached import AttachedProposer
    from scorer_service.sessions import Session

    fits = AttachedProposer.fits

    def chosen(self: AttachedProposer, session: Session) -> bool:
        return session.request.tenant in ("", self.pool) and fits(self, session)

    mock.patch.object(AttachedProposer, "fits", chosen).start()


if __name__ == "__main__":
    serve(change)
