"""The page at / in a real browser, over the embedded models and over a fake scorer."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from outrider.errors import InternalError
from tests.support.browser import CHROMIUM, DESKTOP, PHONE, Screen, opened
from tests.support.services import up
from tests.support.services.fake_scorer import Script
from tests.support.services.gateway import running_gateway, tokens
from tests.support.waiting import until

pytest.importorskip("playwright.async_api")
pytestmark = [
    pytest.mark.browser,
    pytest.mark.timeout(300),  # the stack's start is part of a test
    pytest.mark.skipif(CHROMIUM is None, reason="needs chromium on the PATH"),
]

TEXT = "hello 🎉 world, naïve café 日本語"
IDLE = "#run:not(:disabled)"

# The least contrast of texts with what lies behind them, as WCAG counts it.
CONTRAST = """() => {
  const parts = colour => colour.match(/[\\d.]+/g).map(Number);
  const light = colour => parts(colour).slice(0, 3).map(v => v / 255)
    .map(v => v <= .04045 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4)
    .reduce((sum, v, i) => sum + v * [.2126, .7152, .0722][i], 0);
  const behind = node => {
    const colour = getComputedStyle(node).backgroundColor;
    return parts(colour)[3] === 0 && node.parentElement ? behind(node.parentElement) : colour;
  };
  const shown = [...document.querySelectorAll('body *')].filter(node => node.checkVisibility() &&
    [...node.childNodes].some(child => child.nodeType === 3 && child.data.trim()) &&
    !node.disabled && node.tagName !== 'OPTION');
  return Math.min(...shown.map(node => {
    const [low, high] = [light(getComputedStyle(node).color), light(behind(node))].sort();
    return (high + .05) / (low + .05);
  }));
}"""
OUTSIDE = """() => [...document.querySelectorAll('body *')].filter(node => {
  const {left, right} = node.getBoundingClientRect();
  return left < 0 || right > innerWidth;
}).map(node => node.outerHTML.slice(0, 80))"""
UNNAMED = """() => [...document.querySelectorAll('input, select, textarea')]
  .filter(node => !node.labels.length).map(node => node.id)"""


@pytest.fixture(scope="module")
def stack() -> Iterator[up.Up]:
    with up.running(*up.EVERY_ROUND) as running:
        yield running


@pytest.mark.parametrize("screen", [DESKTOP, PHONE], ids=["desktop", "phone"])
async def test_comparison_shows_same_text_with_kinds_and_speeds(
    stack: up.Up, screen: Screen
) -> None:
    async with opened(stack.http, screen) as page:
        await page.fill("#max_tokens", "48")
        await page.focus("#prompt")
        await page.keyboard.press("Control+Enter")
        await page.wait_for_selector(IDLE)
        assert not await page.is_visible("#error"), await page.inner_text("#error")
        status = await page.inner_text("#status")
        assert "The texts are the same." in status
        assert re.search(r"[\d.]+ times as fast", status)
        texts = [await page.text_content(f"#{name} .text") for name in ("with", "without")]
        assert texts[0] == texts[1] != ""
        assert await page.locator("#with .text .accepted").count() > 0
        assert await page.locator("#without .text .token:not(.plain)").count() == 0
        for name in ("with", "without"):
            assert re.fullmatch(r"[\d.]+ tokens/s", await page.inner_text(f"#{name} .speed"))

        await page.focus("#with summary")
        await page.keyboard.press("Enter")
        facts = await page.inner_text("#with .facts")
        counted = re.match(r"(\d+) tokens in (\d+) rounds", facts)
        assert counted, facts
        assert await page.locator("#with li .token").count() == int(counted[1])
        assert await page.locator("#with li").count() in (int(counted[2]), int(counted[2]) + 1)
        assert await page.is_visible("#with li .accepted")

        # A click on an accepted token shows its round's draft, in which it is marked.
        token = page.locator("#with .text .accepted").first
        position = await token.get_attribute("data-position")
        await token.click()
        draft = page.locator(f"#with-{position} ul").first
        assert await draft.is_visible()
        drafted = await draft.locator(".token").count()
        accepted = await page.locator(f"#with-{position} > .accepted").all_text_contents()
        assert await draft.locator(".accepted").all_text_contents() == accepted
        assert await draft.locator(".drafted").count() == drafted - len(accepted)
        button = page.locator(f"#with-{position} button")
        assert await button.get_attribute("aria-expanded") == "true"
        await button.press("Enter")
        assert not await draft.is_visible()
        assert await page.locator("#without li button").count() == 0
        rejected = page.locator("#with li:has(> .recovered) button").first
        await rejected.click()
        assert await page.locator("#with li:has(> .recovered) ul .drafted").count() > 0

        assert await page.evaluate(OUTSIDE) == []
        assert await page.evaluate(UNNAMED) == []
        assert await page.evaluate(CONTRAST) >= 4.5


async def test_chat_with_key_runs_and_stops(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("secret-key\n")
    script = Script(tokens(TEXT * 5), delay_s=0.05)
    async with (
        running_gateway(script, api_key_file=str(keys)) as gateway,
        opened(gateway.http, PHONE) as page,
    ):
        await page.wait_for_selector("#error:visible")
        assert (await page.inner_text("#error")).startswith("401: ")
        await page.fill("#key", "secret-key")
        await page.press("#key", "Tab")
        await page.wait_for_selector("#error", state="hidden")
        await page.check("input[value=chat]")
        await page.select_option("#speculation", "with")
        await page.fill("#seed", "7")
        await page.click("#run")
        await page.wait_for_selector("#with .bonus")
        await page.keyboard.press("Escape")
        await page.wait_for_selector(IDLE)
        assert await page.inner_text("#status") == "Stopped."
        await until(lambda: gateway.scorer.cancelled == 1)
        assert gateway.scorer.requests[0].sampling.seed == 7
        gateway.scorer.script.delay_s = 0.0
        await page.click("#run")
        await page.wait_for_selector(IDLE)
        assert await page.text_content("#with .text") == TEXT * 5
        assert await page.inner_text("#status") == "Done, seed 7."


@pytest.mark.parametrize(
    ("fault", "shown"),
    [
        ({"refuse": InternalError("broken")}, "500: "),
        ({"die_after": 4, "refuse": InternalError("broken")}, "broken"),
    ],
)
async def test_errors_are_shown_with_text_so_far(fault: dict[str, Any], shown: str) -> None:
    async with (
        running_gateway(Script(tokens(TEXT), **fault), resume_timeout_s=0.3) as gateway,
        opened(gateway.http, DESKTOP) as page,
    ):
        await page.click("#run")
        await page.wait_for_selector("#error:visible")
        assert shown in await page.inner_text("#error")
        assert await page.inner_text("#status") == "Failed."
        text = await page.text_content("#with .text")
        assert text is not None
        assert TEXT.startswith(text)
        assert bool(text) == ("die_after" in fault)
