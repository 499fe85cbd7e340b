"""Values as operators write them: rendered and valid, or refused with the reason and the mend."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.kubernetes import helm

CASES: dict[str, dict[str, Any]] = yaml.safe_load(
    Path(__file__).with_name("cases.yaml").read_text()
)["cases"]


@pytest.fixture(scope="module")
def rendered(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What helm says of each case."""
    folder = tmp_path_factory.mktemp("cases")
    found = {}
    for number, (name, case) in enumerate(CASES.items()):
        file = folder / f"{number}.yaml"
        file.write_text(yaml.safe_dump(case["values"]))
        found[name] = helm.template(values=file)
    return found


@pytest.mark.parametrize("name", CASES)
def test_values_of_operators_render_what_they_ask_for_or_are_refused(
    name: str, rendered: dict[str, Any]
) -> None:
    case, done = CASES[name], rendered[name]
    if "refused" in case:
        assert done.returncode != 0
        assert case["refused"] in done.stderr
        return
    assert done.returncode == 0, done.stderr
    for text in case["shows"]:
        assert text in done.stdout
    for text in case.get("lacks", ()):
        assert text not in done.stdout


def test_values_of_operators_render_valid_manifests(
    rendered: dict[str, Any], tmp_path: Path
) -> None:
    files: dict[str, list[Path]] = {}
    for number, (name, case) in enumerate(CASES.items()):
        if "refused" not in case:
            file = tmp_path / f"{number}.yaml"
            file.write_text(rendered[name].stdout)
            files.setdefault(case.get("since", "1.30"), []).append(file)
    assert len(CASES) >= 47
    for oldest, some in files.items():
        done = helm.validate([oldest, "1.37"], *some)
        assert done.returncode == 0, done.stdout + done.stderr
