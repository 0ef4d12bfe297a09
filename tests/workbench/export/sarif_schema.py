"""The part of SARIF 2.1.0's schema (OASIS, errata 01) that a report of ours may use: of each object the properties with
their types, and which it must have. What is not here is not written.

The whole schema is 136 kB: to hold a file against it take jsonschema with its checkers of formats, and
sarif-2.1.0-rtm.5.json of npm's @microsoft/jest-sarif. What test_sarif.py makes was found valid there."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

Check = Callable[[Any], bool]


def text(value: Any) -> bool:
    return isinstance(value, str)


def flag(value: Any) -> bool:
    return isinstance(value, bool)


def index(value: Any) -> bool:
    return type(value) is int and value >= -1


def uri_reference(value: Any) -> bool:
    """RFC 3986: its characters alone, and every escape complete."""
    return (
        text(value)
        and re.fullmatch(r"(?:[\w.~:/?#\[\]@!$&'()*+,;=-]|%[0-9A-Fa-f]{2})*", value, re.ASCII) is not None
    )


def absolute_uri(value: Any) -> bool:
    return uri_reference(value) and bool(urlsplit(value).scheme)


def texts(value: Any) -> bool:
    return isinstance(value, dict) and all(map(text, value.values()))


def bag(value: Any) -> bool:
    """Any properties at all; JSON has neither NaN nor infinity."""
    numbers = [one for one in value.values() if isinstance(one, float)]
    return isinstance(value, dict) and all(map(math.isfinite, numbers))


def one_of(*words: str) -> Check:
    return lambda value: value in words


LEVEL = one_of("none", "note", "warning", "error")
#: Object -> property -> a check of its value, the object that it is, or [the object of which it is a list]; a name with
#: "!" is required.
OBJECTS: dict[str, dict[str, Check | str | list[str]]] = {
    "log": {"$schema": absolute_uri, "version!": one_of("2.1.0"), "runs!": ["run"]},
    "run": {"tool!": "tool", "invocations": ["invocation"], "results": ["result"]},
    "tool": {"driver!": "toolComponent"},
    "toolComponent": {"name!": text, "version": text, "rules": ["reportingDescriptor"]},
    "reportingDescriptor": {"id!": text, "shortDescription": "multiformatMessageString"},
    "multiformatMessageString": {"text!": text},
    "invocation": {"executionSuccessful!": flag, "toolExecutionNotifications": ["notification"]},
    "notification": {"level": LEVEL, "message!": "message"},
    "message": {"text!": text},  # or an id
    "result": {
        "ruleId": text, "ruleIndex": index, "level": LEVEL, "message!": "message", "locations": ["location"],
        "partialFingerprints": texts, "properties": bag,
    },
    "location": {"physicalLocation": "physicalLocation", "logicalLocations": ["logicalLocation"]},
    "physicalLocation": {"artifactLocation!": "artifactLocation"},  # or an address
    "artifactLocation": {"uri": uri_reference},
    "logicalLocation": {"fullyQualifiedName": text, "kind": text},
}  # fmt: skip
#: Lists without equal elements.
UNIQUE = {"rules", "logicalLocations"}


def valid_sarif(document: str) -> dict[str, Any]:
    """The report, decoded; AssertionError where it is not to the schema, or a rule is not the one that it names."""
    log: dict[str, Any] = json.loads(document, parse_constant=lambda name: _refuse(name))
    _hold("log", log, "$")
    for run in log["runs"]:
        rules = run["tool"]["driver"].get("rules", [])
        for result in run.get("results", []):
            assert rules[result["ruleIndex"]]["id"] == result["ruleId"]
    return log


def _refuse(name: str) -> None:
    raise AssertionError(f"{name} is no JSON")


def _hold(kind: str, value: Any, where: str) -> None:
    assert isinstance(value, dict), where
    known = {name.rstrip("!"): check for name, check in OBJECTS[kind].items()}
    wanted = {name.rstrip("!") for name in OBJECTS[kind] if name.endswith("!")}
    assert wanted <= value.keys() <= known.keys(), (where, value.keys())
    for name, inner in value.items():
        check, place = known[name], f"{where}.{name}"
        if isinstance(check, str):
            _hold(check, inner, place)
        elif isinstance(check, list):
            assert isinstance(inner, list), place
            assert name not in UNIQUE or len({json.dumps(one) for one in inner}) == len(inner), place
            for number, one in enumerate(inner):
                _hold(check[0], one, f"{place}[{number}]")
        else:
            assert check(inner), (place, inner)
