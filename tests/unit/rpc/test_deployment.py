"""The flags that all three services share."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from gateway.__main__ import main as gateway
from outrider.errors import ConfigError
from outrider.rpc.deployment import Deployment, TlsFiles
from proposer_service.__main__ import main as proposer
from proposer_service.__main__ import parse
from scorer_service.__main__ import main as scorer
from scorer_service.__main__ import resolve

NGRAM = ("--scorer", "a:1", "--method", "ngram")
SERVICES = {
    "scorer": lambda *flags: scorer(flags),
    "proposer": lambda *flags: proposer((*NGRAM, *flags)),
    "gateway": lambda *flags: gateway(["--scorer", "a:1", *flags]),
}


@pytest.fixture
def tls(tmp_path: Path) -> TlsFiles:
    for name in ("cert", "key", "ca"):
        (tmp_path / name).touch()
    return TlsFiles(*(str(tmp_path / name) for name in ("cert", "key", "ca")))


def test_deployment_flags_when_given_reach_the_services(tls: TlsFiles) -> None:
    assert tls.ca is not None
    flags = ("--tls-cert", tls.cert, "--tls-key", tls.key, "--tls-ca", tls.ca)
    flags = (*flags, "--drain-grace-seconds", "2.5", "--health-port", "9")
    expected = Deployment(drain_grace_s=2.5, health_port=9, tls=tls)
    assert resolve((*flags, "--listen-unix", "/run/s"))["deployment"] == expected
    config, _ = parse((*NGRAM, *flags, "--dns-refresh-seconds", "7"))
    assert config.deployment == expected
    assert config.dns_refresh_s == 7


@pytest.mark.parametrize("service", SERVICES)
def test_deployment_flags_in_help_are_all_explained(
    service: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        SERVICES[service]("--help")
    _, _, options = capsys.readouterr().out.partition("options:\n")
    flags = re.split(r"^  (?=-)", options, flags=re.MULTILINE)[1:]
    assert len(flags) > 10
    for flag in flags:  # its name, and then, two blanks away or on another line, what it is for
        assert len(re.split(r"  +|\n +", flag.strip())) > 1, flag


def test_deployment_without_flags_has_the_defaults() -> None:
    assert resolve(())["deployment"] == Deployment() == parse(NGRAM)[0].deployment


@pytest.mark.parametrize("service", SERVICES)
@pytest.mark.parametrize(
    ("flags", "why"),
    [
        (("--tls-cert", __file__), "--tls-cert and --tls-key go together"),
        (("--tls-ca", __file__), "--tls-ca needs both"),
        (("--tls-cert", "/nowhere", "--tls-key", __file__), "--tls-cert /nowhere: there is no"),
        (("--drain-grace-seconds", "-1"), "--drain-grace-seconds must be"),
        (("--drain-grace-seconds", "inf"), "--drain-grace-seconds must be"),
    ],
)
def test_deployment_flags_that_cannot_work_are_named(
    service: str, flags: tuple[str, ...], why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert SERVICES[service](*flags) == 2
    output = capsys.readouterr()
    assert output.err.startswith(f"{service}: ")
    assert why in output.err
    assert output.err.count("\n") == 1
    assert output.out == ""


def test_proposer_max_sessions_beyond_the_protocol_is_refused(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for number in ("0", str(2**32)):
        assert proposer((*NGRAM, "--max-sessions", number)) == 2
        assert "--max-sessions is at least 1" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flag", "value", "why"),
    [
        ("--metrics-port", "-5", "'-5' is not a port"),
        ("--max-model-len", "2", "'2' is not a whole number of at least 3"),
        ("--max-num-seqs", "many", "'many' is not a whole number"),
        ("--max-num-seqs", "9" * 5000, "'9+' is not a whole number"),
        ("--num-speculative-tokens", "129", "'129' is not a whole number from 0 to 128"),
        ("--gpu-memory-utilization", "all", "'all' is not a number above 0"),
    ],
)
def test_scorer_flags_with_impossible_number_are_refused(flag: str, value: str, why: str) -> None:
    with pytest.raises(ConfigError, match=f"{flag}: {why}"):
        resolve((flag, value))


@pytest.mark.parametrize("service", SERVICES)
def test_port_flag_when_impossible_is_refused(
    service: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """gRPC would take it modulo 65536."""
    flag = "--grpc-port" if service == "gateway" else "--port"
    assert SERVICES[service](flag, "65536") == 2
    assert capsys.readouterr().err == (
        f"{service}: argument {flag}: '65536' is not a port from 0 to 65535\n"
    )


@pytest.mark.parametrize("service", SERVICES)
def test_empty_host_is_refused(service: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A script's unset variable would open HTTP and metrics at every address."""
    assert SERVICES[service]("--host", "") == 2
    assert capsys.readouterr().err == f"{service}: argument --host: must not be empty\n"


@pytest.mark.parametrize("service", ["proposer", "gateway"])
def test_dns_refresh_flag_out_of_bounds_is_refused(
    service: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert SERVICES[service]("--dns-refresh-seconds", "0") == 2
    assert "--dns-refresh-seconds must be between" in capsys.readouterr().err


def test_deployment_with_health_port_has_a_health_address() -> None:
    assert Deployment().health_address("h") is None
    assert Deployment(health_port=0).health_address("h") == "h:0"
    assert Deployment(health_port=0).health_address("::") == "[::]:0"
    with pytest.raises(ConfigError, match="drain-grace"):
        Deployment(drain_grace_s=float("nan"))


def test_gateway_flags_with_one_port_twice_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert SERVICES["gateway"]("--http-port", "8000", "--grpc-port", "8000") == 2
    assert "--http-port and --grpc-port must differ" in capsys.readouterr().err
    assert SERVICES["gateway"]("--grpc-port", "8000", "--metrics-port", "8000") == 2
    assert "--grpc-port and --metrics-port must differ" in capsys.readouterr().err


@pytest.mark.parametrize(
    "origin",
    [
        "",
        "foo",
        "https://a.example/",
        "https://A.example",
        "http://a,http://b",
        "https://*.example",
    ],
)
def test_gateway_with_what_is_no_origin_is_refused(
    origin: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert SERVICES["gateway"]("--scorer=h:1", "--start-timeout=1", "--cors-origin", origin) == 2
    assert f"--cors-origin {origin!r} is not what browsers send" in capsys.readouterr().err
