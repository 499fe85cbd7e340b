"""Real clients, in environments of their own, against real servers (`make test-clients`)."""

from __future__ import annotations

import re

import pytest

from tests.support.browser import CHROMIUM
from tests.support.clients import PROGRAMS, Server, run, run_beside, weather_server

pytestmark = [pytest.mark.clients, pytest.mark.timeout(900)]


def check(results: dict[str, str], program: str, subtests: pytest.Subtests) -> None:
    for name, error in results.items():
        with subtests.test(name):
            assert not error, error
    written = re.findall(r"^(?:@case|test\()", (PROGRAMS / program).read_text(), re.MULTILINE)
    assert len(results) == len(written), "not all cases ran"


@pytest.mark.parametrize(
    ("environment", "program"),
    [
        ("python", "openai_client.py"),
        ("python", "anthropic_client.py"),
        ("python", "litellm_client.py"),
        ("python", "langchain_client.py"),
        ("python", "llama_index_client.py"),
        ("python", "instructor_client.py"),
        ("python", "pydantic_ai_client.py"),
        ("node", "openai_client.mjs"),
        ("node", "ai_sdk.mjs"),
        ("lm_eval", "lm_eval_client.py"),
        ("guidellm", "guidellm_client.py"),
    ],
)
def test_client_gets_what_it_asks_for(
    stack: Server, environment: str, program: str, subtests: pytest.Subtests
) -> None:
    check(run(environment, program, stack), program, subtests)


@pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium")
def test_page_may_ask_if_its_origin_is_allowed(stack: Server, subtests: pytest.Subtests) -> None:
    check(run("python", "browser.py", stack), "browser.py", subtests)


@pytest.mark.parametrize(
    ("environment", "program"), [("python", "tool_loops.py"), ("node", "tool_loops.mjs")]
)
async def test_agent_calls_two_tools_and_ends(
    environment: str, program: str, subtests: pytest.Subtests
) -> None:
    async with weather_server() as server:
        check(await run_beside(environment, program, server), program, subtests)
