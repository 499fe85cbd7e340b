"""The page at `/` to try the model on: one file, which calls the HTTP API as any client does."""

from __future__ import annotations

import base64
import hashlib
import re
from functools import cache
from importlib import resources

from starlette.requests import Request
from starlette.responses import Response


async def playground(request: Request) -> Response:
    """Return the page, or 304 if the browser has it. It is the same for everyone: no key needed."""
    body, headers = _page()
    known = re.findall(r'"[^"]*"|\*', request.headers.get("if-none-match", ""))
    if headers["ETag"] in known or "*" in known:
        return Response(status_code=304, headers=headers)
    return Response(body, headers=headers, media_type="text/html")


@cache
def _page() -> tuple[bytes, dict[str, str]]:
    body = resources.files("gateway").joinpath("playground.html").read_bytes()
    policy = (
        *("default-src 'none'", "connect-src 'self'", "img-src data:"),
        f"script-src {_hashed(body, b'script')}",
        f"style-src {_hashed(body, b'style')}",
        *("base-uri 'none'", "form-action 'none'", "frame-ancestors 'none'"),
        "require-trusted-types-for 'script'",
    )
    return body, {
        "Cache-Control": "no-cache",
        "Content-Security-Policy": "; ".join(policy),
        "ETag": f'"{hashlib.sha256(body).hexdigest()[:32]}"',
        "Referrer-Policy": "no-referrer",
        "X-Content-Type-Options": "nosniff",
    }


def _hashed(body: bytes, tag: bytes) -> str:
    """Return the page's only element `tag` as a source that the policy allows."""
    (content,) = re.findall(b"<%b>(.*?)</%b>" % (tag, tag), body, re.DOTALL)
    return f"'sha256-{base64.b64encode(hashlib.sha256(content).digest()).decode()}'"
