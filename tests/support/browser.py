"""A headless chromium, driven by playwright. `make test-browser` says what it needs."""

from __future__ import annotations

import os
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:  # it is not among the project's own packages
    from playwright.async_api import Page

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
_ARGS = ("--disable-gpu", "--disable-background-networking", "--disable-component-update")


@dataclass(frozen=True, slots=True)
class Screen:
    """Size in CSS pixels, and the colours that the user prefers."""

    width: int
    height: int
    colours: Literal["light", "dark"]


DESKTOP = Screen(1000, 720, "light")
PHONE = Screen(360, 740, "dark")


@asynccontextmanager
async def opened(url: str, screen: Screen) -> AsyncIterator[Page]:
    """The page at `url`; at the end it must not have broken its own policy or raised anything."""
    from playwright.async_api import async_playwright

    root = ("--no-sandbox",) if os.geteuid() == 0 else ()
    complaints: list[str] = []
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=CHROMIUM, args=[*_ARGS, *root])
        page = await browser.new_page(
            viewport={"width": screen.width, "height": screen.height}, color_scheme=screen.colours
        )
        page.set_default_timeout(60_000)
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on(
            "console",
            # An answer with an error status is one, too; the page shows it.
            lambda said: (
                complaints.append(said.text)
                if said.type in ("error", "warning")
                and not said.text.startswith("Failed to load resource")
                else None
            ),
        )
        await page.goto(url)
        yield page
        await browser.close()
    assert not complaints, complaints
