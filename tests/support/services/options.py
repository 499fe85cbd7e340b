"""Requests of GenerationService, field by field."""

from __future__ import annotations

from dataclasses import dataclass

from outrider.v1 import common_pb2, generation_pb2


@dataclass(frozen=True, slots=True)
class GenerateOptions:
    """A completion request as a person types it; `None` leaves the choice to the server."""

    prompt: str
    model: str = ""
    max_tokens: int | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    speculation: bool = True
    methods: tuple[str, ...] = ()  # the preferred one first
    num_speculative_tokens: int | None = None
    aux_info: bool = False

    def to_proto(self) -> generation_pb2.GenerateRequest:
        """Return the message for GenerationService.Generate."""
        return generation_pb2.GenerateRequest(
            model=self.model,
            text=self.prompt,
            sampling=common_pb2.SamplingParams(
                temperature=self.temperature,
                top_k=self.top_k,
                top_p=self.top_p,
                min_p=self.min_p,
                seed=self.seed,
            ),
            stop=common_pb2.StopParams(max_tokens=self.max_tokens, ignore_eos=self.ignore_eos),
            stop_strings=self.stop,
            speculation=common_pb2.SpeculationParams(
                enabled=self.speculation,
                methods=self.methods,
                num_speculative_tokens=self.num_speculative_tokens,
            ),
            aux_info=self.aux_info,
        )
