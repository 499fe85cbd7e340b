"""What --scorer may name, and names whose addresses change."""

from __future__ import annotations

import asyncio

import pytest

from outrider.errors import ConfigError
from outrider.rpc.targets import Target, Targets, join_address, parse_entries
from tests.support.services.names import Names


def test_parse_entries_of_known_forms_accepts_them() -> None:
    assert parse_entries("a:1, unix:/run/s.sock,dns:scorer.default.svc:7001,[::1]:7001,") == (
        "a:1",
        "unix:/run/s.sock",
        "dns:scorer.default.svc:7001",
        "[::1]:7001",
    )


@pytest.mark.parametrize(
    ("host", "address"), [("::1", "[::1]:7"), ("::", "[::]:7"), ("0.0.0.0", "0.0.0.0:7")]
)
def test_join_address_of_ipv6_puts_it_in_brackets(host: str, address: str) -> None:
    assert join_address(host, 7) == address


@pytest.mark.parametrize(
    "text",
    [
        *("scorer", "scorer:", ":7001", "dns:scorer", "unix:s.sock", "a:0", "a:65536", "a:b"),
        *("grpc://a:7001", "http://a:7001"),
    ],
)
def test_parse_entries_of_unknown_form_names_the_entry(text: str) -> None:
    with pytest.raises(ConfigError, match=f"--scorer '{text}' is not an address.*dns:host:port"):
        parse_entries(f"good:1,{text}")


def test_parse_entries_of_repeated_entries_refuses() -> None:
    with pytest.raises(ConfigError, match="twice"):
        parse_entries("a:1,a:1")


async def test_targets_when_fixed_are_yielded_once() -> None:
    targets = Targets(("a:1", "unix:/s"))
    assert [found async for found in targets.follow()] == [(Target("a:1"), Target("unix:/s"))]


async def test_targets_with_a_name_look_it_up_again(monkeypatch: pytest.MonkeyPatch) -> None:
    names = Names(monkeypatch)
    names.table["scorers"] = ["10.0.0.2", "10.0.0.1", "10.0.0.2"]
    follow = Targets(("a:1", "dns:scorers:7"), refresh_s=0.01).follow()

    def found(*hosts: str) -> tuple[Target, ...]:
        return (Target("a:1"), *(Target(f"{host}:7", "scorers") for host in hosts))

    async with asyncio.timeout(20):
        assert await anext(follow) == found("10.0.0.1", "10.0.0.2")
        names.table["scorers"] = ["fd00::2", "10.0.0.2"]  # one pod, two families
        assert await anext(follow) == found("10.0.0.2")
        names.table["scorers"] = ["fd00::3", "fd00::2"]
        assert await anext(follow) == found("[fd00::2]", "[fd00::3]")
        # Nothing is taken away while a name cannot be looked up: not told, and then the change.
        del names.table["scorers"]
        changed = asyncio.ensure_future(anext(follow))
        await names.asked_again()
        assert not changed.done()
        names.table["scorers"] = ["10.0.0.4"]
        assert await changed == found("10.0.0.4")
    await follow.aclose()


async def test_targets_with_an_invalid_name_follow_the_others() -> None:
    follow = Targets(("a:1", "dns:scorer..svc:7001")).follow()
    assert await anext(follow) == (Target("a:1"),)
    await follow.aclose()


async def test_targets_with_a_real_name_resolve_it() -> None:
    follow = Targets(("dns:localhost:7001",)).follow()
    (target, *_) = await anext(follow)
    assert target.address in ("127.0.0.1:7001", "[::1]:7001")
    await follow.aclose()
