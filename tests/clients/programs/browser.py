"""A page's fetch, in chromium, from an origin that may ask and from one that may not."""

from __future__ import annotations

import functools
import http.server
import os
import threading
from typing import Any

from cases import BASE_URL, case, main, raises
from playwright.sync_api import sync_playwright

ASK = """async ([url, stream]) => {
  const answer = await fetch(`${url}/v1/chat/completions`, {
    method: "POST",
    headers: {"content-type": "application/json", authorization: "Bearer none"},
    body: JSON.stringify({
      messages: [{role: "user", content: "Write a function."}],
      max_tokens: 24, temperature: 0, stream,
    }),
  });
  if (!stream) return [(await answer.json()).choices[0].message.content, 1, ""];
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "", reads = 0;
  for (;;) {
    const {done, value} = await reader.read();
    if (done) break;
    reads += 1;
    text += value;
  }
  let said = "";
  for (const line of text.split("\\n")) {
    if (line.startsWith("data: {")) {
      said += JSON.parse(line.slice(6)).choices[0]?.delta?.content ?? "";
    }
  }
  return [said, reads, answer.headers.get("x-request-id")];
}"""
PORT = int(os.environ["ALLOWED_PORT"])


class _Page(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("content-type", "text/html")
        self.end_headers()
        self.wfile.write(b"<p>A page.")

    def log_message(self, *_: Any) -> None:
        pass


@functools.cache
def serve() -> None:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", PORT), _Page)
    threading.Thread(target=server.serve_forever, daemon=True).start()


def on_page(origin: str, script: str, *arguments: Any) -> Any:
    serve()
    root = ["--no-sandbox"] if os.geteuid() == 0 else []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=os.environ["CHROMIUM"], args=["--disable-gpu", *root]
        )
        page = browser.new_page()
        page.goto(origin)
        return page.evaluate(script, list(arguments))


@case
def page_of_an_allowed_origin() -> None:
    origin = f"http://localhost:{PORT}"
    whole, _, _ = on_page(origin, ASK, BASE_URL, False)
    said, reads, request_id = on_page(origin, ASK, BASE_URL, True)
    assert said == whole
    assert reads > 1, "the stream came at once"
    assert request_id, "the page cannot read x-request-id"


@case
def page_of_another_origin() -> None:
    origin = f"http://127.0.0.1:{PORT}"
    raises(Exception, "Failed to fetch", lambda: on_page(origin, ASK, BASE_URL, False))


main()
