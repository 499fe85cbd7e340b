"""Hidden states that proposers may ask for, and the projections that they bring."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Callable, Iterable

from outrider.draft_port import HiddenStateControl
from outrider.errors import DeadlineError, InvalidRequestError, ProposerRefusedError
from outrider.features import FeatureSpec
from outrider.rpc.feature_codec import features_from_proto
from outrider.v1 import draft_pb2
from scorer_service.config import DraftLimits, ServedModel


def check_features(
    hello: draft_pb2.Hello, served: ServedModel, limits: DraftLimits
) -> FeatureSpec | None:
    """Return the hidden states that a proposer needs, None for none.

    Raises `InvalidRequestError` if no target could have them, and `ProposerRefusedError` if this
    scorer does not capture them.
    """
    if not hello.HasField("features"):
        return None
    spec, captured = features_from_proto(hello.features), served.features
    if captured is None:
        advice = served.no_features.format(states=",".join(spec.states))
        raise _refusal(
            f"{hello.method} needs hidden states, and this scorer captures none: {advice}"
        )
    if spec.hidden_size != captured.hidden_size:
        raise _refusal(
            f"the draft was made for a target whose states have {spec.hidden_size} values, this "
            f"one's have {captured.hidden_size}: use a draft for this target"
        )
    missing = [state for state in spec.states if state not in captured.states]
    if missing:
        wanted = sorted({*spec.layers, *captured.layers})
        final = ["final"] if spec.final_norm or captured.final_norm else []
        raise _refusal(
            f"this scorer captures {','.join(captured.states)}, not {','.join(missing)}: start it "
            f"with --hidden-features {','.join([*map(str, wanted), *final])}"
        )
    if spec.projection_bytes > limits.max_projection_bytes:
        raise _refusal(
            f"a projection may have {limits.max_projection_bytes} bytes, not "
            f"{spec.projection_bytes}: project in the proposer"
        )
    return spec


class Projections:
    """The few matrices that the engine holds, by digest. Lives on the event loop."""

    def __init__(self, engine: HiddenStateControl, limits: DraftLimits) -> None:
        self._engine = engine
        self._limits = limits
        self._held: dict[bytes, asyncio.Future[None]] = {}
        """Done once the engine has the matrix; least recently requested first."""
        # Matrices are large, so no more are read at once than may be kept.
        self._reading = asyncio.Semaphore(limits.max_projections)

    def lacks(self, spec: FeatureSpec | None) -> bool:
        """Return whether a proposer has to send its matrix."""
        if spec is None or not spec.projection_dim:
            return False
        held = self._held.get(spec.projection_sha256)
        if held is None or not held.done():
            return True
        self._held[spec.projection_sha256] = self._held.pop(spec.projection_sha256)
        return False

    def note(self, spec: FeatureSpec) -> None:
        """Note a matrix that the engine was given before any proposer attached."""
        if spec.projection_dim:
            self._held[spec.projection_sha256] = held = asyncio.get_running_loop().create_future()
            held.set_result(None)

    async def receive(
        self,
        spec: FeatureSpec,
        requests: AsyncIterator[draft_pb2.DraftRequest],
        in_use: Callable[[], Iterable[bytes]],
    ) -> None:
        """Read the chunks of a matrix, check it and give it to the engine.

        `in_use` returns the digests that attached proposers need. Raises the error that the stream
        should end with.
        """
        try:
            async with asyncio.timeout(self._limits.projection_timeout_s):
                async with self._reading:
                    matrix = await _read_matrix(spec, requests)
                # When this stream ends, another proposer may still wait for the matrix.
                await asyncio.shield(self._hold(spec, matrix, in_use))
        except TimeoutError:
            seconds = self._limits.projection_timeout_s
            raise DeadlineError(f"the projection was not complete within {seconds:g} s") from None

    def _hold(
        self, spec: FeatureSpec, matrix: bytearray, in_use: Callable[[], Iterable[bytes]]
    ) -> asyncio.Future[None]:
        digest = spec.projection_sha256
        held = self._held.get(digest)
        if held is not None:  # another proposer sent it meanwhile
            return held
        needed = set(in_use())
        idle = [digest for digest in self._held if digest not in needed]
        if len(self._held) >= self._limits.max_projections:
            if not idle:
                raise _refusal(
                    f"{self._limits.max_projections} different projections are in use already: "
                    "project in the proposer"
                )
            del self._held[idle[0]]
            self._engine.drop_projection(idle[0])
        put = asyncio.wrap_future(self._engine.put_projection(spec, matrix))
        self._held[digest] = kept = asyncio.ensure_future(self._keep(digest, put))
        return kept

    async def _keep(self, digest: bytes, put: asyncio.Future[None]) -> None:
        try:
            await put
        except Exception as error:
            self._held.pop(digest, None)
            raise _refusal(
                f"the projection could not be kept on the device ({type(error).__name__}): give "
                "keys and values less memory, or project in the proposer"
            ) from error


def _refusal(message: str) -> ProposerRefusedError:
    return ProposerRefusedError(message, reason="FEATURES_UNAVAILABLE")


async def _read_matrix(
    spec: FeatureSpec, requests: AsyncIterator[draft_pb2.DraftRequest]
) -> bytearray:
    matrix, digest = bytearray(), hashlib.sha256()
    while len(matrix) < spec.projection_bytes:
        request = await anext(requests, None)
        if request is None or request.WhichOneof("message") != "projection":
            raise InvalidRequestError(
                "the projection that Welcome asks for comes before anything else",
                param="projection",
            )
        chunk = request.projection
        fits = chunk.offset == len(matrix) and chunk.data
        if not fits or len(matrix) + len(chunk.data) > spec.projection_bytes:
            raise InvalidRequestError(
                f"a ProjectionChunk of {len(chunk.data)} bytes at {chunk.offset} does not follow "
                f"{len(matrix)} of {spec.projection_bytes}",
                param="projection",
            )
        matrix += chunk.data
        digest.update(chunk.data)
    if digest.digest() != spec.projection_sha256:
        raise InvalidRequestError(
            "the projection is not the one of FeatureSpec.projection_sha256", param="projection"
        )
    return matrix
