"""Scorers that draft themselves."""

from __future__ import annotations

from typing import Any

import pytest

from outrider.drafting.building.config import (
    DraftModelConfig,
    HeadConfig,
    MethodConfig,
    NgramConfig,
    SuffixConfig,
)
from outrider.methods import BLOCK_METHODS, METHODS
from scorer_service import __main__ as scorer_main
from tests.support.kubernetes import helm

ONE_GPU = helm.EXAMPLES / "h100-llama-eagle3.yaml"
EMBEDDED_EAGLE3 = "2,4,7"  # the layers that its config.json names


def no_pool(*sets: str) -> tuple[str, ...]:
    """Without the default pool, which fits the embedded target alone, where there is another."""
    given = any("model.name=" in text for text in sets)
    pool = any("proposers.draft" in text for text in sets)
    return ("proposers.draft=null",) if given and not pool else ()


def scorer_pod(*sets: str) -> dict[str, Any]:
    scorer = helm.only(helm.render(*sets, *no_pool(*sets)), "StatefulSet", "outrider-scorer")
    found: dict[str, Any] = scorer["spec"]["template"]["spec"]
    return found


def resolved(*sets: str) -> dict[str, Any]:
    """What the scorer reads in its flags."""
    (container,) = scorer_pod(*sets)["containers"]
    return scorer_main.resolve(container["args"])


def methods(*sets: str) -> tuple[MethodConfig, ...]:
    found: tuple[MethodConfig, ...] = resolved(*sets)["in_process_proposer"]
    return found


def test_scorer_drafts_in_process_only_if_set() -> None:
    assert methods() == methods("scorer.inProcess=null") == ()
    for method in METHODS:
        model = () if method in ("deterministic", "suffix", "ngram") else ("model=org/draft",)
        sets = [f"scorer.inProcess.{value}" for value in (f"method={method}", *model)]
        if method in BLOCK_METHODS:  # else its config.json is looked up
            sets.append("scorer.hiddenFeatures=2")
        (config,) = methods(*sets)
        assert config.name == method


def test_scorer_drafting_in_process_shares_one_gpu() -> None:
    rendered = helm.render(values=ONE_GPU)
    kinds = {w["metadata"]["name"]: w for w in helm.workloads(rendered)}
    assert set(kinds) == {"outrider-gateway", "outrider-scorer"}
    (scorer,) = helm.containers(kinds["outrider-scorer"])
    assert scorer["resources"]["limits"]["nvidia.com/gpu"] == 1
    args = scorer_main.resolve(scorer["args"])
    (method,) = args["in_process_proposer"]
    assert isinstance(method, HeadConfig)
    assert (method.name, method.max_draft_tokens, method.target_model) == (
        *("eagle3", 8),
        args["model"],
    )
    assert method.device == args["device"] == "cuda"
    assert args["hidden_features"] == "eagle3"


def test_in_process_values_reach_scorer_flags_unchanged() -> None:
    own = "scorer.inProcess"
    odd = 'it\'s "two" words'
    copying, model = methods(
        f"{own}.method=suffix\\,draft_model",
        f"{own}.model=/models/bob's",
        f"{own}.dtype=bfloat16",
        f"{own}.flags.kv-cache-memory=1024",
        f"{own}.flags.suffix-decoding-min-token-prob=0.25",
        f"{own}.flags.shared-memory-across-tenants=true",
        f"{own}.flags.attention-backend={odd}",
    )
    assert isinstance(copying, SuffixConfig)
    assert copying.settings.min_token_prob == 0.25
    assert copying.settings.shared_across_tenants
    assert isinstance(model, DraftModelConfig)
    assert (model.model, model.dtype, model.kv_cache_memory, model.attention_backend) == (
        *("/models/bob's", "bfloat16", 1024),
        odd,
    )


def test_in_process_draft_model_is_fetched_before_start() -> None:
    def fetched(*sets: str) -> list[list[str]]:
        sets = (*sets, "model.cache.tokenSecret=hub")
        pod = scorer_pod(*sets)
        inits = pod.get("initContainers", [])
        offline = {"name": "HF_HUB_OFFLINE", "value": "1"} in pod["containers"][0]["env"]
        policy = helm.only(helm.render(*sets, *no_pool(*sets)), "NetworkPolicy", "outrider-scorer")[
            "spec"
        ]
        hub = {"ports": [{"port": 443}]} in policy["egress"]
        token = "hub-token" in {volume["name"] for volume in pod["volumes"]}
        seen = ["hub-token" in {m["name"] for m in init["volumeMounts"]} for init in inits]
        assert {offline, hub, token, *seen} == {bool(inits)}
        assert {init["args"][-1] for init in inits} <= {"--retry-seconds=1800"}
        return [init["args"][:-1] for init in inits]

    own = "scorer.inProcess"
    draft = (f"{own}.method=draft_model", f"{own}.model=org/draft")
    assert fetched(*draft) == [["org/draft"]]
    assert fetched(*draft, "model.name=org/target") == [["org/target"], ["org/draft"]]
    module = (f"{own}.method=eagle3\\,ngram", f"{own}.model=org/module")
    folder = "model.name=/models/target"
    assert fetched(*module, folder) == [["org/module", "--module-of=/models/target"]]
    assert fetched(f"{own}.method=mtp", f"{own}.model=/models/module", folder) == []
    assert fetched(f"{own}.method=suffix", "model.name=org/target") == [["org/target"]]


def test_hidden_states_for_every_reader_are_kept() -> None:
    def kept(*sets: str) -> str | None:
        found: str | None = resolved(*sets)["hidden_features"]
        return found

    own, mtp = "scorer.inProcess.method", "proposers.draft.method=mtp"
    assert kept(f"{own}=ngram") is None
    assert kept(f"{own}=eagle3") == EMBEDDED_EAGLE3  # the scorer's own finding
    assert kept(f"{own}=medusa") == "final"
    assert kept(f"{own}=ngram", mtp) == kept(f"{own}=medusa", mtp) == "final"
    assert kept(f"{own}=eagle3", mtp) == "eagle3,final"
    other = "scorer.hiddenFeatures=2\\,4\\,7\\,final"
    assert kept(f"{own}=eagle3", mtp, other) == "2,4,7,final"


def test_pools_with_in_process_drafter_are_rendered() -> None:
    sets = ("scorer.inProcess.method=ngram", "proposers.draft.placement=sidecar")
    scorer, sidecar = scorer_pod(*sets)["containers"]
    args = scorer_main.resolve(scorer["args"])
    assert [type(method) for method in args["in_process_proposer"]] == [NgramConfig]
    assert f"--scorer=unix:{args['listen_unix']}" in sidecar["args"]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ("method=hydra", 'scorer.inProcess.method is "hydra": known are deterministic,'),
        ("method=ngram\\,ngram", "scorer.inProcess.method is"),
        ("method=mtp\\,draft_model", "model can name what one of draft_model,mtp drafts with"),
        ("method=eagle", "scorer.inProcess.model: method eagle needs the folder or the Hugging"),
        ("method=eagle3,model.name=org/target", "a module that was trained for org/target"),
        ("method=draft_model,model.name=org/target", "of a draft for org/target"),
        ("method=ngram,scorer.inProcess.model=org/draft", "method ngram reads no model"),
        ("method=suffix,scorer.inProcess.dtype=float32", "method suffix reads no model"),
        ("model=org/draft", "scorer.inProcess.method is empty"),
        ("flags.threads=2", "scorer.inProcess.method is empty"),
        (
            "method=ngram,scorer.engine=vllm,scorer.vllmFlags.speculative-config=x",
            "scorer.vllmFlags.speculative-config lets vLLM draft",
        ),
        ("method=medusa,scorer.hiddenFeatures=eagle3", "medusa of scorer.inProcess reads final"),
        ("method=eagle3,scorer.hiddenFeatures=final", "eagle3 of scorer.inProcess reads eagle3"),
        ("method=mtp,scorer.inProcess.flags.device=cpu", "the chart sets --device itself"),
        ("device=cuda", "at '/scorer/inProcess': additional properties 'device' not allowed"),
        ("model=draft", "at '/scorer/inProcess/model'"),
        ("dtype=float16", "at '/scorer/inProcess/dtype'"),
    ],
)
def test_in_process_values_that_cannot_work_are_refused(wrong: str, message: str) -> None:
    done = helm.template(f"scorer.inProcess.{wrong}", *no_pool(wrong))
    assert done.returncode != 0
    assert message in done.stderr


def test_in_process_flag_of_chart_is_known_to_scorer() -> None:
    done = helm.template("scorer.flags.in-process-proposer=--method=ngram")
    assert "in-process-proposer: the chart sets" in done.stderr


@pytest.mark.parametrize("inside", [False, True])
def test_notes_with_in_process_drafter_name_it(inside: bool) -> None:
    own = ("--set", "scorer.inProcess.method=suffix") if inside else ()
    flags = ("--dry-run=client", "--set", "proposers.draft=null", *own)
    done = helm.call("helm", "install", "outrider", helm.CHART, *flags)
    assert done.returncode == 0, done.stderr
    assert ("Each scorer drafts itself, by suffix," in done.stdout) == inside
    assert ("served without speculation" in done.stdout) != inside
