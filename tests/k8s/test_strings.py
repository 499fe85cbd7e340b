"""No string among the values can say more in a manifest than itself."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from tests.support.kubernetes import helm

Place = tuple[str | int, ...]
EVERYTHING = """
image: {pullSecrets: [registry]}
model:
  name: org/model
  aliases: [m]
  cache: {storage: 10Gi, storageClassName: fast, tokenSecret: hub}
gateway:
  apiKeySecret: keys
  ingress: {enabled: true, className: nginx, hosts: [a.example], annotations: {a: b}}
  httpRoute: {enabled: true, parentRefs: [{name: a}], hostnames: [a.example], annotations: {a: b}}
  grpcRoute: {enabled: true, parentRefs: [{name: gate}], hostnames: [a.example]}
  service: {annotations: {a: b}}
  env: [{name: A, value: b}]
  pod: {annotations: {a: b}, labels: {a: b}, volumes: [{name: v, emptyDir: {}}]}
  scheduling: {nodeSelector: {a: b}, priorityClassName: high, runtimeClassName: nvidia}
  flags: {x-y: z}
scorer: {autoscaling: {enabled: true}, flags: {x-y: z}, env: [{name: A, value: b}]}
proposers: {draft: {autoscaling: {enabled: true}, method: suffix, flags: {x-y: z}}}
autoscaling: {engine: keda, keda: {authenticationRef: {name: a}, metadata: {a: b}}}
tls: {enabled: true, certManager: {enabled: true, issuerRef: {name: ca, kind: Issuer}}}
monitoring:
  serviceMonitor: {enabled: true, labels: {a: b}}
  rules: {enabled: true, labels: {a: b}}
  dashboards: {enabled: true, labels: {a: b}}
otel: {endpoint: "http://collector:4317", env: [{name: A, value: b}]}
serviceAccount: {create: true, name: account, annotations: {a: b}}
"""
# Python ends a pattern also before a last newline, so the text has more behind it.
EVIL = "x: y # {\ninjected: [*a, 'b\n- "
CHECK = """
import copy, json, sys, jsonschema
schema, values, places, evil = json.load(sys.stdin)
validator = jsonschema.Draft7Validator(schema)
for place in places:
    changed = at = copy.deepcopy(values)
    for key in place[:-1]:
        at = at[key]
    at[place[-1]] = evil
    if validator.is_valid(changed):
        print(json.dumps(place))
"""


def merged(base: dict[str, Any], more: dict[str, Any]) -> dict[str, Any]:
    both = {k: merged(base[k], v) for k, v in more.items() if isinstance(base.get(k), dict)}
    return base | more | both


def strings(value: Any, place: Place = ()) -> Iterator[Place]:
    """Where the strings of a value are."""
    if isinstance(value, str):
        yield place
    elif isinstance(value, dict | list):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from strings(item, (*place, key))


def values() -> dict[str, Any]:
    defaults = yaml.safe_load((helm.CHART / "values.yaml").read_text())
    return merged(defaults, yaml.safe_load(EVERYTHING))


def put(into: Any, place: Place, text: str) -> None:
    for key in place[:-1]:
        into = into[key]
    into[place[-1]] = text


def test_every_string_that_the_schema_accepts_is_rendered_as_it_is(tmp_path: Path) -> None:
    schema = json.loads((helm.CHART / "values.schema.json").read_text())
    everything = values()
    places = list(strings(everything))
    accepted = helm.python(CHECK, [schema, everything, places, EVIL])
    assert ["gateway", "service", "annotations", "a"] in accepted
    assert ["model", "name"] not in accepted
    changed = copy.deepcopy(everything)
    texts = {}
    for number, place in enumerate(accepted):
        texts[f"{number} {EVIL}"] = place
        put(changed, place, f"{number} {EVIL}")
    file = tmp_path / "values.yaml"
    file.write_text(json.dumps(changed))
    rendered = helm.render(values=file)
    found = [manifest_string(rendered, place) for place in strings(rendered)]
    missing = [place for text, place in texts.items() if not any(text in each for each in found)]
    assert missing == []
    keys = {key for place in strings(rendered) for key in place}
    assert "injected" not in keys


def manifest_string(rendered: list[helm.Manifest], place: Place) -> str:
    found: Any = rendered
    for key in place:
        found = found[key]
    assert isinstance(found, str)
    return found


def test_names_that_yaml_would_read_as_something_else_stay_strings(tmp_path: Path) -> None:
    changed = values()
    names = {
        ("model", "cache", "storageClassName"): "1e3",
        ("model", "cache", "tokenSecret"): "true",
        ("gateway", "apiKeySecret"): "null",
        ("gateway", "ingress", "className"): "123",
        ("image", "pullSecrets", 0): "0x10",
        ("serviceAccount", "name"): "1.5",
        ("fullnameOverride",): "true",
    }
    for place, name in names.items():
        put(changed, place, name)
    file = tmp_path / "values.yaml"
    file.write_text(json.dumps(changed))
    rendered = helm.render(values=file)
    found = {manifest_string(rendered, place) for place in strings(rendered)}
    assert set(names.values()) <= found
