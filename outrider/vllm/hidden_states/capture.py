"""Keeps the hidden states that vLLM's steps compute, in the slots of their keys and values.

So a prompt from the prefix cache has them, those of a rejected draft are overwritten, and a request
that vLLM takes out and runs again has them again. Layers' states come from the interface that vLLM
itself uses for EAGLE-3; the final norm's output is what the model returns.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from outrider.engine.kv_cache.hidden_states import HiddenStatePool
from outrider.engine.step import RowSlots
from outrider.errors import ConfigError
from outrider.features import FeatureSpec, parse_features
from outrider.vllm import adapter, versions
from outrider.vllm.hidden_states.hosted import HostedStates

_log = logging.getLogger(__name__)


def states_of(text: str, config: Any) -> FeatureSpec:
    """Return the states that `--hidden-features` names of the target in a `VllmConfig`.

    Raises `ConfigError`, also for other flags of vLLM with which they cannot be kept.
    """
    spec = parse_features(text, *adapter.target_shape(config))
    if reason := adapter.without_states(config):
        raise ConfigError(f"--hidden-features cannot be kept: {reason}")
    if 0 in spec.layers and adapter.runs_eagerly(config):
        raise ConfigError(
            "--hidden-features 0: without compilation (--enforce-eager), vLLM's kernels overwrite "
            "what enters the first layer. Leave one of the two out."
        )
    if lacking := versions.missing_names(versions.STATES):
        raise ConfigError(f"--hidden-features needs names that vLLM moved: {'; '.join(lacking)}")
    return spec


def hand_out_layers(runner: Any, spec: FeatureSpec) -> None:
    """Let the model of a runner hand out the layers' states, on every rank, before its first run.

    Raises `ConfigError` for a model that cannot.
    """
    if not spec.layers:
        return
    model = runner.get_model()
    if not adapter.hands_out_layers(model):
        raise ConfigError(
            f"--hidden-features {','.join(spec.states)}: vLLM hands out states between layers only "
            f"of models with its interface for EAGLE-3, which {type(model).__name__} lacks. Give "
            "--hidden-features final, or none."
        )
    runner.use_aux_hidden_state_outputs = True
    runner._get_eagle3_aux_layers_from_config = lambda: spec.layers
    runner._setup_eagle3_aux_hidden_state_outputs()  # vLLM does it again, if it loads the model now

    def check(model: Any, _: Any, output: Any) -> None:
        """Check the output of the first run, by which some models leave out their last layer."""
        handle.remove()
        found = len(output[1]) if isinstance(output, tuple) else 0
        if found != len(spec.layers):
            raise ConfigError(
                f"--hidden-features {','.join(spec.states)}: vLLM's {type(model).__name__} hands "
                f"out {found} of these {len(spec.layers)} layers' states. Leave the last layer out."
            )

    handle = model.register_forward_hook(check)  # an error of it ends vLLM's start


class Capture:
    """Follows a model runner that computes on this rank."""

    def __init__(self, runner: Any, worker: Any, spec: FeatureSpec) -> None:
        """Replace methods of a runner and of its worker."""
        self._runner = runner
        self._group = 0  # of layers that keep all positions, among those of the KV cache
        self._pool = HiddenStatePool(spec, 0, 1, runner.device)
        self.states = HostedStates(self._pool, self._located, self._slots)
        self._forward, self._initialize = runner._model_forward, runner.initialize_kv_cache
        runner._model_forward, runner.initialize_kv_cache = self._run, self._allocate
        self._measure = worker.determine_available_memory
        self._warm_up = worker.compile_or_warm_up_model
        worker.determine_available_memory = self._available_memory
        worker.compile_or_warm_up_model = self._begin

    def _available_memory(self) -> int:
        """Return what is left for keys and values beside hidden states, in bytes."""
        left = int(self._measure())
        page_bytes, page_size = adapter.page_of(self._runner)
        states = page_size * self._pool.bytes_per_slot
        return left * page_bytes // (page_bytes + states)

    def _allocate(self, kv_cache_config: Any, *args: Any, **kwargs: Any) -> None:
        self._initialize(kv_cache_config, *args, **kwargs)
        self._group, self._pool.page_size = adapter.full_group(kv_cache_config.kv_cache_groups)
        self._pool.resize(kv_cache_config.num_blocks)

    def _begin(self) -> Any:
        times = self._warm_up()
        self.states.begin()
        return times

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        output = self._forward(*args, **kwargs)
        # With `--async-scheduling` the states of the step before are read by now: these may have
        # the pages of a request that vLLM took out.
        if not self.states.broken:
            try:
                self._keep(output)
            except Exception:
                self.states.broken = True
                _log.exception("hidden states are not sent until vLLM is restarted")
        return output

    def _keep(self, output: Any) -> None:
        final, layers = output if isinstance(output, tuple) else (output, ())
        spec, slots = self._pool.spec, self._slots().slots
        count = len(slots)
        for layer, states in zip(spec.layers, layers, strict=True):
            self._pool.enter(layer, slots, states[:count])
        if spec.final_norm:
            self._pool.final(slots, final[:count])

    def _slots(self) -> RowSlots:
        """Return the slots of the step's tokens, without padding."""
        batch = self._runner.input_batch
        *firsts, count = self._runner.query_start_loc.np[: batch.num_reqs + 1].tolist()
        return RowSlots(batch.block_table[self._group].slot_mapping.gpu[:count], firsts)

    def _located(self, name: str) -> tuple[int, Sequence[int]]:
        state = self._runner.requests[name]
        return state.num_computed_tokens, state.block_ids[self._group]
