"""GuideLLM, a load generator, which reads the usage of each event."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from cases import BASE_URL, case, main


def run(more: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        command = [
            *(str(Path(sys.executable).with_name("guidellm")), "run", "--disable-console"),
            *("--backend", f"kind=openai_http,target={BASE_URL},model=default{more}"),
            *("--profile", "kind=synchronous"),
            *("--constraint", "kind=max_requests,count=3"),
            *("--tokenizer", f"kind=hf_auto,model={os.environ['TARGET']}"),
            *("--data", "kind=synthetic_text,prompt_tokens=24,output_tokens=12"),
            *("--output", f"kind=json,path={report}"),
        ]
        environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
        done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
        assert report.exists(), f"{done.stdout}\n{done.stderr}"
        requests = json.loads(report.read_text())["benchmarks"][0]["requests"]
    assert not requests["errored"], requests["errored"]
    assert len(requests["successful"]) == 3
    assert all(each["output_tokens"] == 12 for each in requests["successful"])


@case
def chats() -> None:
    run("")


@case
def completions() -> None:
    run(",request_format=/v1/completions")


main()
