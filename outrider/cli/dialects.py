"""Flags and variables of other engines, and what they mean here: a table for each engine.

Flags are written with hyphens; underscores are read alike. A flag that means here what it means
there, such as vLLM's --max-num-seqs, is in no table.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final, Literal

from outrider.methods import METHODS


@dataclass(frozen=True, slots=True)
class Rule:
    """The fate of a flag: `ours` takes its value, or it is needless, or it is refused."""

    ours: str | None = None
    note: str | None = None
    """Why nothing is to be done. With `harmless` it holds for these values alone."""
    refusal: str | None = None
    """The words to write instead."""
    takes: Literal["one", "none", "maybe"] = "one"
    """The number of values that follow."""
    harmless: tuple[str, ...] = ()
    values: Mapping[str, str] = field(default_factory=dict)
    """Their value, in lower case -> ours; others go as they are."""
    convert: Callable[[str], str] = str
    also: tuple[str, ...] = ()
    """Further words of ours."""
    keys: Mapping[str, Rule] | None = None
    """The value is a JSON object with these keys."""
    needs: tuple[tuple[str, ...], str] | None = None
    """Flags of ours of which one has to be given, too, and what to say where none is."""
    secret: bool = False
    """The value is never printed."""


@dataclass(frozen=True, slots=True)
class Dialect:
    """The command line of one engine."""

    flags: Mapping[str, Rule]
    variables: Mapping[str, str] = field(default_factory=dict)
    """Environment variable -> the flag that it stands for."""
    leading: str = ""
    """The variable without which the others are not looked at: they may belong to anything."""

    def needless(self, flag: str) -> str | None:
        """Return why nothing is to be done for a flag, whatever its value; None: something is."""
        rule = self.flags.get(flag)
        return None if rule is None or rule.refusal is not None else rule.note


def _is(ours: str, values: Mapping[str, str] | None = None) -> Rule:
    return Rule(ours, values=values or {})


def _needless(why: str, takes: Literal["one", "none", "maybe"] = "one") -> Rule:
    return Rule(note=why, takes=takes)


def _only(*harmless: str, refusal: str) -> Rule:
    return Rule(note="it is so here", refusal=refusal, harmless=harmless)


def _refused(instead: str, takes: Literal["one", "none", "maybe"] = "one") -> Rule:
    return Rule(refusal=instead, takes=takes)


def _count(text: str) -> str:
    return str(len(text.split(",")))


def _one_less(text: str) -> str:
    return str(int(text) - 1) if text.isdecimal() else text


_METHODS: Final = {
    **{name: name for name in METHODS},  # in any case
    **{"[ngram]": "ngram", "lookup": "ngram", "none": "none"},
    **dict.fromkeys(("nextn", "glm4_moe_mtp"), "mtp"),
    **dict.fromkeys(("vanilla", "standalone"), "draft_model"),
}
"""Their names of methods, beside the aliases that are known everywhere."""
_DTYPES: Final = {"half": "float16", "float": "float32", "bf16": "bfloat16", "fp16": "float16"}
_DRAFT_QUANTIZATIONS: Final = {
    **{name: name for name in ("int8", "none")},
    # 8 bits of any kind are int8, which is nearer to 16; no text depends on it.
    **dict.fromkeys(("weight_only_int8", "a8w8_fp8", "fp8", "fp8_per_block"), "int8"),
}
_DRAFT_QUANTIZATION: Final = Rule(
    "--draft-quantization",
    values=_DRAFT_QUANTIZATIONS,
    refusal="write --draft-quantization int8, fp8 or none: a draft has no other quantisation",
    harmless=tuple(_DRAFT_QUANTIZATIONS),
)
_QUANTIZATIONS: Final = {
    **{name: name for name in ("int8", "fp8", "none")},
    **{"weight_only_int8": "int8", "a8w8_fp8": "fp8", "w8a8_fp8": "fp8"},
}
_QUANTIZATION: Final = Rule(
    "--quantization",
    values=_QUANTIZATIONS,
    refusal="write --quantization int8 or fp8 to round 16-bit weights, or leave it out: "
    "config.json names a checkpoint's own quantisation, and --engine vllm serves it",
    harmless=tuple(_QUANTIZATIONS),
)
_KV_CACHE_DTYPES: Final = {"auto": "auto", "fp8": "fp8", "fp8_e4m3": "fp8"}
_KV_CACHE_DTYPE: Final = Rule(
    "--kv-cache-dtype",
    values=_KV_CACHE_DTYPES,
    refusal="write fp8, which is e4m3, or after --engine vllm -- what vLLM knows",
    harmless=tuple(_KV_CACHE_DTYPES),
)
_METRICS: Final = _needless("/metrics is always served", "none")
_EAGER: Final = _needless("steps are captured where that is faster; no text changes", "none")
_REMOTE_CODE: Final = _needless("no code of checkpoints is run: transformers knows them", "none")
_LOGS: Final = _needless("prompts and answers are never logged", "none")
_LOG_LEVEL: Final = _needless("there is one level")
_ONE_REPLICA: Final = _only(
    "1", refusal="run `outrider serve` once for each replica; a gateway takes several --scorer"
)
_MACHINES: Final = (
    "write --nnodes N --master-addr FIRST, and run `outrider scorer` with --node-rank on the "
    "others (docs/operations.md, Over several GPUs)"
)
_API_KEY: Final = Rule(refusal="write the key into a file: --api-key-file FILE", secret=True)
_TOKENIZER: Final = _refused("leave it out: the tokenizer is the one in MODEL's folder")
_PREFETCHED: Final = _needless("the best that fits is chosen by measurement", "maybe")

_ONE_DEVICE: Final = _only("1", refusal="leave it out: a draft runs on one device")

_SPECULATIVE_CONFIG: Final = {
    "method": _is("--method", _METHODS),
    "model": _is("--draft-model"),
    "num_speculative_tokens": _is("--num-speculative-tokens"),
    "prompt_lookup_max": _is("--prompt-lookup-max"),
    "prompt_lookup_min": _is("--prompt-lookup-min"),
    "suffix_decoding_max_tree_depth": _is("--suffix-decoding-max-tree-depth"),
    "suffix_decoding_max_spec_factor": _is("--suffix-decoding-max-spec-factor"),
    "suffix_decoding_min_token_prob": _is("--suffix-decoding-min-token-prob"),
    "suffix_decoding_max_cached_requests": _is("--suffix-decoding-max-cached-requests"),
    "rejection_sample_method": Rule(
        note="synthetic_acceptance_rates or synthetic_acceptance_length say it",
        refusal='leave it out: each request names its rule, as "verification": "block"',
        harmless=("synthetic",),
        needs=(
            ("--synthetic-acceptance-rates", "--synthetic-acceptance-length"),
            "synthetic needs synthetic_acceptance_rates or synthetic_acceptance_length",
        ),
    ),
    "synthetic_acceptance_rates": _is("--synthetic-acceptance-rates"),
    "synthetic_acceptance_length": _is("--synthetic-acceptance-length"),
    "draft_tensor_parallel_size": _ONE_DEVICE,
    "draft_pipeline_parallel_size": _ONE_DEVICE,
    "tensor_parallel_size": _ONE_DEVICE,
    "max_model_len": _is("--draft-max-model-len"),
    "quantization": _DRAFT_QUANTIZATION,
    "disable_padded_drafter_batch": _needless("drafts are packed without padding"),
    "disable_by_batch_size": _needless("where drafting does not pay, it is switched off by itself"),
    "enforce_eager": _EAGER,
    "use_local_argmax_reduction": _needless("a draft runs on one device"),
    "use_heterogeneous_vocab": _needless("a draft has the target's tokenizer"),
    "disable_logprobs": _needless("log probabilities are the target's, with any draft"),
}

VLLM: Final = Dialect(
    {
        "--speculative-config": Rule(keys=_SPECULATIVE_CONFIG),
        "--speculative-model": Rule("--draft-model", values={"[ngram]": "--method=ngram"}),
        "--ngram-prompt-lookup-max": _is("--prompt-lookup-max"),
        "--ngram-prompt-lookup-min": _is("--prompt-lookup-min"),
        "--speculative-max-model-len": _is("--draft-max-model-len"),
        "--speculative-draft-tensor-parallel-size": _ONE_DEVICE,
        "--speculative-disable-by-batch-size": _SPECULATIVE_CONFIG["disable_by_batch_size"],
        "-tp": _is("--tensor-parallel-size"),
        "-pp": _is("--pipeline-parallel-size"),
        "-dp": _is("--data-parallel-size"),
        "--distributed-executor-backend": _needless("each device has a process"),
        "--dtype": _is("--dtype", _DTYPES),
        "--quantization": _QUANTIZATION,
        "-q": _QUANTIZATION,
        "--kv-cache-dtype": _KV_CACHE_DTYPE,
        "--load-format": _only("auto", "safetensors", refusal="serve a folder of safetensors"),
        "--block-size": _is("--page-size"),
        "--trust-remote-code": _REMOTE_CODE,
        "--enforce-eager": _EAGER,
        "--compilation-config": _needless("decode and verification steps are always captured"),
        "--async-scheduling": _needless("the next step is always prepared meanwhile", "none"),
        "--enable-chunked-prefill": _needless("prompts are always computed in chunks", "none"),
        "--enable-auto-tool-choice": _needless("tools are always taken", "none"),
        "--use-v2-block-manager": _needless("the cache is always paged", "none"),
        "--max-seq-len-to-capture": _needless("the sizes of captured steps follow --max-num-seqs"),
        "--swap-space": _needless("nothing is swapped: a preempted request is computed again"),
        "--disable-log-requests": _LOGS,
        "--disable-log-stats": _needless("numbers go to the metrics, not to a log", "none"),
        "--uvicorn-log-level": _LOG_LEVEL,
        "--api-key": _API_KEY,
        "--allowed-origins": _refused("write --cors-origin ORIGIN"),
        "--tokenizer": _TOKENIZER,
        "--revision": _refused("download that revision, and serve its folder"),
        "--enable-lora": _refused(
            "write --engine vllm -- --enable-lora --lora-modules NAME=DIR", "none"
        ),
    }
)

LMDEPLOY: Final = Dialect(
    {
        "--server-port": _is("--port"),
        "--server-name": _is("--host"),
        "--model-name": _is("--served-model-name"),
        "--model-path": _is("--model"),
        "--backend": _needless("there is one backend"),
        "--model-format": _only("hf", refusal="serve an unquantised Hugging Face checkpoint"),
        "--speculative-algorithm": _is("--method", _METHODS),
        "--speculative-draft-model": _is("--draft-model"),
        "--speculative-num-draft-tokens": _is("--num-speculative-tokens"),
        "--mtp-path": Rule("--draft-model", also=("--method=mtp",)),
        "--mtp-quant": _DRAFT_QUANTIZATION,
        "--num-tokens": Rule("--num-speculative-tokens", convert=_one_less),
        "--tp": _is("--tensor-parallel-size"),
        "--dp": _ONE_REPLICA,
        "--session-len": _is("--max-model-len"),
        "--max-batch-size": _is("--max-num-seqs"),
        "--max-prefill-token-num": _is("--max-num-batched-tokens"),
        "--cache-max-entry-count": _refused(
            "write --gpu-memory-utilization, a part of all memory, or --kv-cache-memory MiB"
        ),
        "--cache-block-seq-len": _is("--page-size"),
        "--quantization": _QUANTIZATION,
        "--quant-policy": _only("0", refusal="write --kv-cache-dtype fp8, or leave it out"),
        "--enable-metrics": _METRICS,
        "--log-level": _LOG_LEVEL,
        "--api-keys": _API_KEY,
    }
)

SGLANG: Final = Dialect(
    {
        "--model-path": _is("--model"),
        "--tokenizer-path": _TOKENIZER,
        "--speculative-algorithm": _is("--method", _METHODS),
        "--speculative-algo": _is("--method", _METHODS),
        "--speculative-draft-model-path": _is("--draft-model"),
        "--speculative-num-draft-tokens": _is("--num-speculative-tokens"),
        "--speculative-num-steps": _needless("the depth follows from the number of draft tokens"),
        "--speculative-eagle-topk": _is("--tree-width"),
        "--tp": _is("--tensor-parallel-size"),
        "--tp-size": _is("--tensor-parallel-size"),
        "--dp-size": _ONE_REPLICA,
        "--context-length": _is("--max-model-len"),
        "--max-running-requests": _is("--max-num-seqs"),
        "--chunked-prefill-size": _is("--max-num-batched-tokens"),
        "--mem-fraction-static": _is("--gpu-memory-utilization"),
        "--cuda-graph-max-bs": _needless("steps are captured up to --max-num-seqs rows"),
        "--disable-cuda-graph": _EAGER,
        "--disable-radix-cache": Rule(also=("--no-enable-prefix-caching",), takes="none"),
        "--random-seed": _is("--seed"),
        "--quantization": _QUANTIZATION,
        "--kv-cache-dtype": _KV_CACHE_DTYPE,
        "--trust-remote-code": _REMOTE_CODE,
        "--enable-metrics": _METRICS,
        "--log-level": _LOG_LEVEL,
        "--api-key": _API_KEY,
    }
)

RTP_LLM: Final = Dialect(
    {
        "--checkpoint-path": _is("--model"),
        "--model-type": _needless("config.json says it"),
        "--tokenizer-path": _TOKENIZER,
        "--act-type": _is("--dtype", _DTYPES),
        "--start-port": _is("--port"),
        "--tp-size": _is("--tensor-parallel-size"),
        "--max-seq-len": _is("--max-model-len"),
        "--concurrency-limit": _is("--max-num-seqs"),
        "--sp-type": _is("--method", _METHODS),
        "--sp-checkpoint-path": _is("--draft-model"),
        "--sp-model-type": _needless("the draft's config.json and tensors say it"),
        "--sp-act-type": _needless("a draft's dtype is chosen by its device"),
        "--gen-num-per-cycle": _is("--num-speculative-tokens"),
        "--gen-num-per-circle": _is("--num-speculative-tokens"),
        "--sp-min-token-match": _only(
            "2", refusal="send it with each request, as extra_config.sp_min_token_match"
        ),
        "--sp-max-token-match": _only("2", refusal="leave it out: the longest match counts"),
        "--sp-quantization": _DRAFT_QUANTIZATION,
    },
    {
        "SP_TYPE": "--sp-type",
        "SP_CHECKPOINT_PATH": "--sp-checkpoint-path",
        "SP_MODEL_TYPE": "--sp-model-type",
        "SP_QUANTIZATION": "--sp-quantization",
        "SP_MIN_TOKEN_MATCH": "--sp-min-token-match",
        "SP_MAX_TOKEN_MATCH": "--sp-max-token-match",
        "GEN_NUM_PER_CYCLE": "--gen-num-per-cycle",
        "GEN_NUM_PER_CIRCLE": "--gen-num-per-cycle",
        "CHECKPOINT_PATH": "--checkpoint-path",
        "TP_SIZE": "--tp-size",
    },
    leading="SP_TYPE",
)

PADDLENLP: Final = Dialect(
    {
        "--model-name-or-path": _is("--model"),
        "--speculate-method": _is("--method", _METHODS),
        "--speculate-max-draft-token-num": _is("--num-speculative-tokens"),
        "--speculate-max-ngram-size": Rule("--prompt-lookup-max", also=("--prompt-lookup-min=1",)),
        "--speculate-verify-window": _refused(
            "send it with each request: verification top_p_window"
        ),
        "--speculate-max-candidate-len": _refused(
            "send it with each request: verification top_p_window"
        ),
        "--draft-model-name-or-path": _is("--draft-model"),
        "--draft-model-quant-type": _DRAFT_QUANTIZATION,
        "--quant-type": _QUANTIZATION,
        "--total-max-length": _is("--max-model-len"),
        "--max-length": _is("--default-max-tokens"),
        "--batch-size": _is("--max-num-seqs"),
        "--mode": _only("dynamic", refusal="leave it out: nothing is exported beforehand"),
        "--output-path": _refused("leave it out: nothing is exported; serve the checkpoint itself"),
        "--inference-model": _PREFETCHED,
        "--append-attn": _PREFETCHED,
        "--block-attn": _needless("the cache is always paged", "maybe"),
        "--mla-use-matrix-absorption": _PREFETCHED,
        "--return-full-hidden-states": _needless("a module gets the states it reads", "maybe"),
        "--gpus": Rule("--tensor-parallel-size", convert=_count),
        "--ips": _refused(_MACHINES),
        "--mp-nnode": _only("1", refusal=_MACHINES),  # the container's variable
        "--block-size": _is("--page-size"),
        "--block-ratio": _needless("pages are not divided between prompts and answers"),
    },
    {
        "SPECULATE_METHOD": "--speculate-method",
        "SPECULATE_MODEL_PATH": "--draft-model-name-or-path",
        "SPECULATE_MAX_DRAFT_TOKEN_NUM": "--speculate-max-draft-token-num",
        "SPECULATE_MAX_NGRAM_SIZE": "--speculate-max-ngram-size",
        "SPECULATE_MODEL_QUANT_TYPE": "--draft-model-quant-type",
        "MP_NUM": "--tensor-parallel-size",
        "MP_NNODE": "--mp-nnode",
        "BATCH_SIZE": "--batch-size",
        "BLOCK_BS": "--block-size",
        "BLOCK_RATIO": "--block-ratio",
        "SERVICE_HTTP_PORT": "--port",
    },
    leading="SPECULATE_METHOD",
)

DIALECTS: Final = {
    "vLLM": VLLM,
    "LMDeploy": LMDEPLOY,
    "SGLang": SGLANG,
    "RTP-LLM": RTP_LLM,
    "PaddleNLP": PADDLENLP,
}
"""All dialects. A flag that two of them know means the same in both."""

PROGRAM_WORDS: Final = frozenset({"api_server", "predictor.py", "start_server"})
"""Words of other command lines that name their program."""
