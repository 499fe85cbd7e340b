"""The page at /: anyone may have it, and it can run nothing but itself."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest

from tests.support.services.fake_scorer import Script
from tests.support.services.gateway import running_gateway


@pytest.fixture
async def client(tmp_path: Path) -> AsyncIterator[httpx.AsyncClient]:
    """Of a gateway that wants a key, which this client does not have."""
    keys = tmp_path / "keys"
    keys.write_text("secret-key\n")
    async with (
        running_gateway(Script([]), api_key_file=str(keys)) as gateway,
        httpx.AsyncClient(base_url=gateway.http) as client,
    ):
        yield client


async def test_page_without_key_is_same_page_with_strict_policy(client: httpx.AsyncClient) -> None:
    page = await client.get("/")
    assert page.status_code == 200
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    policy = dict(
        directive.split(" ", 1) for directive in page.headers["content-security-policy"].split("; ")
    )
    assert policy["default-src"] == policy["frame-ancestors"] == "'none'"
    assert policy["connect-src"] == "'self'"
    for tag in ("script", "style"):
        (content,) = re.findall(f"<{tag}>(.*?)</{tag}>", page.text, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        assert policy[f"{tag}-src"] == f"'sha256-{digest}'"
    assert not re.search(r"https?://|//cdn|\sstyle=|\son\w+=|innerHTML", page.text)
    assert (await client.get("/v1/models")).status_code == 401


async def test_page_that_browser_has_is_not_sent_again(client: httpx.AsyncClient) -> None:
    page, head = await client.get("/"), await client.head("/")
    assert head.status_code == 200
    assert head.content == b""
    assert head.headers["content-length"] == str(len(page.content))
    tag = page.headers["etag"]
    assert page.headers["cache-control"] == "no-cache"
    for known in (tag, f'"other", W/{tag}', "*"):
        again = await client.get("/", headers={"if-none-match": known})
        assert (again.status_code, again.content) == (304, b"")
        assert again.headers["etag"] == tag
    assert (await client.get("/", headers={"if-none-match": '"other"'})).status_code == 200
    assert (await client.post("/")).status_code == 405


async def test_page_when_switched_off_is_404() -> None:
    async with (
        running_gateway(Script([]), playground=False) as gateway,
        httpx.AsyncClient(base_url=gateway.http) as client,
    ):
        answer = await client.get("/")
    assert answer.status_code == 404
    assert answer.json()["error"]["message"].startswith("There is no / here. Served: /v1/")
