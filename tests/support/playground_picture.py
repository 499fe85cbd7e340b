"""`make picture`: the page at / after a comparison with the embedded models, as a PNG."""

from __future__ import annotations

import asyncio
import sys
from io import BytesIO

from PIL import Image

from tests.support.browser import DESKTOP, opened
from tests.support.services import up


async def draw(url: str, file: str) -> None:
    async with opened(url, DESKTOP) as page:
        await page.fill("#max_tokens", "96")
        for _ in range(2):  # the first run also warms the services up
            await page.click("#run")
            await page.wait_for_selector("#run:not(:disabled)")
        await page.click("#with summary")
        await page.evaluate("document.activeElement.blur()")
        picture = await page.screenshot(full_page=True)
    colours = Image.open(BytesIO(picture)).convert("RGB")
    colours.quantize(80, dither=Image.Dither.NONE).save(file, optimize=True)


if __name__ == "__main__":
    with up.running(*up.EVERY_ROUND) as stack:
        asyncio.run(draw(stack.http, sys.argv[1]))
