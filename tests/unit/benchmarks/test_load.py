"""The load generator, against servers that send what a test says, byte by byte where it matters."""

import asyncio
import contextlib
import itertools
import json
import statistics

import pytest

from benchmarks import load
from benchmarks.lib.load.driver import Driver, Endpoint, Limits
from benchmarks.lib.load.tally import Bound, Gaps, Tally
from tests.support.waiting import until

CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
EVENTS = (
    b'data: {"choices":[{"text":"","index":0}],"usage":null}\n\n',
    b'data: {"choices":[{"text":"a","index":0}],"usage":null}\n\n',
    b": a comment\n\n",
    b'data: {"choices": [{"delta": {"content": "b\\"c"}}]}\n\n',
    b'data: {"choices":[],"usage":{"prompt_tokens":3,"completion_tokens":7}}\n\n',
    b"data: [DONE]\n\n",
)


def chunk(data):
    return b"%x\r\n%b\r\n" % (len(data), data)


def chunked(events=EVENTS):
    return CHUNKED + b"".join(map(chunk, events)) + b"0\r\n\r\n"


@contextlib.asynccontextmanager
async def server(answer):
    """Answers each request with `answer(writer, number)`; yields the URL."""
    numbers = itertools.count()

    serving = set()

    async def serve(reader, writer):
        serving.add(asyncio.current_task())
        quiet = (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError)
        with contextlib.suppress(*quiet):
            while head := await reader.readuntil(b"\r\n\r\n"):
                length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r")[0])
                json.loads(await reader.readexactly(length))
                await answer(writer, next(numbers))
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as listening:
        yield f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}/v1"
        for task in serving:
            task.cancel()
        await asyncio.gather(*serving)


def sends(data, step=None):
    async def answer(writer, _number):
        for start in range(0, len(data), step or len(data)):
            writer.write(data[start : start + (step or len(data))])
            await writer.drain()
            if step:
                await asyncio.sleep(0)

    return answer


def driver(url, tally, *, requests=3, timeout_s=60.0, seconds=60.0, connections=100):
    args = load.parser().parse_args(["--url", url, "--rate", "1"])
    endpoint = Endpoint.of(url, "/completions")
    limits = Limits(requests, seconds, timeout_s, connections)
    return Driver(endpoint, load.requests(args, endpoint, None), limits, tally)


def new_tally():
    return Tally(Bound(1.0, 1.0))


@pytest.mark.parametrize("step", [None, 1, 3, 7])
@pytest.mark.parametrize("end", [b"\n\n", b"\r\n\r\n"])
async def test_connection_split_anywhere_counts_texts_and_tokens(step, end):
    tally = new_tally()
    events = [event.replace(b"\n\n", end) for event in EVENTS]
    async with server(sends(chunked(events), step)) as url:
        await driver(url, tally).closed_loop(1)
    assert not tally.failures
    assert (len(tally.ttft), tally.messages, tally.tokens, tally.gaps.count) == (3, 6, 21, 3)
    assert tally.good == 3


async def test_connection_without_chunks_reads_to_length_or_end():
    body = b"".join(EVENTS)
    tally = new_tally()
    head = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body)
    async with server(sends(head + body)) as url:
        await driver(url, tally).closed_loop(1)

    async def until_end(writer, _number):
        writer.write(b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n" + body)
        writer.close()

    async with server(until_end) as url:
        await driver(url, tally).closed_loop(1)
    assert (len(tally.ttft), tally.tokens, dict(tally.failures)) == (6, 42, {})


ERROR = b'{"error":{"message":"m","type":"rate_limit_error","code":"rate_limit_exceeded"}}'
REFUSED = b"HTTP/1.1 429 Too Many\r\nContent-Length: %d\r\n\r\n%b" % (len(ERROR), ERROR)
FAILING = chunked([EVENTS[1], b'data: {"error":{"type":"server_error","code":null}}\n\n'])


@pytest.mark.parametrize(
    ("data", "kind", "messages"),
    [
        (REFUSED, "status 429 rate_limit_exceeded", 0),
        (FAILING, "error event: server_error", 3),
        (chunked(EVENTS[:2]), "ended early", 3),
        (chunked([EVENTS[0], *EVENTS[-2:]]), "no text", 0),
        (b"SSH-2.0-x\r\n\r\n", "not HTTP", 0),
        (CHUNKED + b"zz\r\n", "not HTTP", 0),
        (CHUNKED + chunk(EVENTS[1]), "timeout", 3),
    ],
)
async def test_driver_failing_answers_are_counted_by_kind(data, kind, messages):
    tally = new_tally()
    async with server(sends(data)) as url:
        await driver(url, tally, timeout_s=1.0 if kind == "timeout" else 60.0).closed_loop(3)
    assert dict(tally.failures) == {kind: 3}
    assert tally.messages == messages
    assert tally.good == 0


async def test_driver_vanishing_server_tells_reset_and_refused_connections():
    async def vanish(writer, _number):
        writer.write(CHUNKED)
        writer.close()

    tally = new_tally()
    async with server(vanish) as url:
        await driver(url, tally).closed_loop(3)
    await driver(url, tally).closed_loop(3)
    assert dict(tally.failures) == {"closed early": 3, "connection refused": 3}


async def test_closed_loop_keeps_connections_and_number_in_flight():
    tally, writers, under_way, most = new_tally(), set(), 0, 0

    async def answer(writer, _number):
        nonlocal under_way, most
        writers.add(writer)
        under_way += 1
        most = max(most, under_way)
        await asyncio.sleep(0.02)
        under_way -= 1
        writer.write(chunked())

    async with server(answer) as url:
        await driver(url, tally, requests=40).closed_loop(8)
    assert (len(tally.ttft), most, len(writers), tally.most_open) == (40, 8, 8, 8)


async def test_steady_rate_leaves_out_the_end_of_a_load():
    """The last answer takes as long as all before it, with one request in flight of two."""
    tally = new_tally()
    first, text, *rest = (chunk(event) for event in EVENTS)

    async def answer(writer, number):
        writer.write(CHUNKED + first + text)
        await asyncio.sleep(0.9 if number == 8 else 0.1)
        writer.write(b"".join(rest) + b"0\r\n\r\n")

    async with server(answer) as url:
        seconds = await driver(url, tally, requests=9).closed_loop(2)
    rates = tally.numbers(seconds)
    assert rates["tokens_per_s"] < 0.6 * rates["steady_tokens_per_s"]
    assert rates["steady_tokens_per_s"] < 9 * 7 / 0.4


async def test_steady_rate_of_requests_that_all_begin_at_once_is_unknown():
    tally = new_tally()

    async def answer(writer, _number):
        await asyncio.sleep(0.05)
        writer.write(chunked())

    async with server(answer) as url:
        seconds = await driver(url, tally, requests=4).closed_loop(4)
    rates = tally.numbers(seconds)
    assert rates["tokens_per_s"] > 0
    assert rates["steady_tokens_per_s"] is None


async def test_open_loop_slow_server_is_sent_all_and_waits_count():
    tally = new_tally()

    async def answer(writer, number):
        if number < 5:
            await until(lambda: len(tally.ttft) >= 2)
        writer.write(chunked())

    async with server(answer) as url:
        come = [0.0] * 5 + [0.05, 0.1]
        await driver(url, tally, requests=7).open_loop(iter(come))
    assert tally.most_open >= 5
    assert len(tally.ttft) == 7
    assert sum(ttft > 0.1 for ttft in tally.ttft) >= 5, "they waited for the last to come"


async def test_open_loop_beyond_its_connections_fails_here():
    tally = new_tally()

    async def answer(writer, _number):
        await until(lambda: sum(tally.failures.values()) == 3)
        writer.write(chunked())

    async with server(answer) as url:
        await driver(url, tally, requests=5, connections=2).open_loop(iter([0.0] * 5))
    assert dict(tally.failures) == {"no connection left here": 3}
    assert len(tally.ttft) == 2


async def test_driver_at_its_end_waits_as_long_as_a_request_may_take():
    tally = new_tally()

    async def never(_writer, _number):
        await asyncio.sleep(600)

    async with server(never) as url:
        seconds = await driver(url, tally, seconds=0.1, timeout_s=0.3).closed_loop(4)
    assert dict(tally.failures) == {"timeout": 3}
    assert seconds < 60


def test_arrivals_have_their_mean_rate_and_spread():
    times = list(itertools.islice(load.poisson(100.0, seed=1), 20_000))
    gaps = [b - a for a, b in itertools.pairwise(times)]
    assert statistics.mean(gaps) == pytest.approx(0.01, rel=0.05)
    assert statistics.stdev(gaps) == pytest.approx(0.01, rel=0.05)  # as exponential gaps have
    together = list(itertools.islice(load.bursts(100.0, 20, seed=1), 20_000))
    assert len(set(together)) == 1000
    assert together[-1] == pytest.approx(200, rel=0.1)


def test_gaps_quantiles_are_near_those_of_the_values():
    gaps = Gaps()
    assert gaps.quantile(0.5) is None
    for ms in range(1, 1001):
        gaps.add(ms / 1e3)
    gaps.add(0.0)
    for part in (0.5, 0.9, 0.99):
        assert gaps.quantile(part) == pytest.approx(part, rel=0.03)
    assert gaps.quantile(1.0) == pytest.approx(1.0, rel=0.03)


def test_requests_have_their_numbers_and_one_length():
    args = load.parser().parse_args(["--url", "http://x", "--rate", "1", "--chat"])
    endpoint = Endpoint("x", 80, "/chat/completions", "x", None)
    request = load.requests(args, endpoint, "KEY")
    one, other = request(7), request(123_456)
    assert len(one) == len(other)
    head, _, body = other.partition(b"\r\n\r\n")
    assert b"Authorization: Bearer KEY" in head
    assert b"Content-Length: %d" % len(body) in head
    assert json.loads(body)["messages"][0]["content"].startswith("000123456 ")


async def test_report_of_a_load_shows_times_counts_and_failures():
    tally = new_tally()
    async with server(sends(chunked())) as url:
        seconds = await driver(url, tally).closed_loop(1)
    tally.failures["timeout"] += 2
    found = {**tally.numbers(seconds), "generator_cores": 0.1}
    json.dumps(found)
    cells = [tuple(cell.strip() for cell in line.split("|")[1:-1]) for line in load.tables(found)]
    assert ("timeout", "2") in cells
    assert ("answered", "3") in cells


@pytest.mark.parametrize(
    "flags", [["--url", "x"], ["--url", "http://x", "--seconds", "0"], ["--key-env", "NOT_SET_1"]]
)
def test_load_with_bad_flags_says_what_is_wrong(flags, capsys):
    assert load.main(["--url", "http://127.0.0.1:1", "--rate", "1", *flags]) == 2
    assert flags[-2] in capsys.readouterr().err
