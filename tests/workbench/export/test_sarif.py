"""SARIF reports are to the schema, whatever strangers call their taps and files."""

from __future__ import annotations

import json

import pytest

from lockstep.workbench.export.sarif import SarifResult, sarif
from tests.workbench.export.sarif_schema import valid_sarif


@pytest.mark.parametrize("level", ["none", "note", "warning", "error"])
def test_a_result_is_to_the_schema(level: str) -> None:
    one = SarifResult(
        "layers.0.mlp.up", "run.session", "it differs", level, {"maxAbs": 1.5, "rows": 3, "by": "hash"}
    )
    log = valid_sarif(sarif([one, one], version="1.2", notes=["a note"]))
    assert [result["level"] for result in log["runs"][0]["results"]] == [level, level]


@pytest.mark.parametrize("name", ["", "a b", "c:d", "ä\x1b[31m\n", "100%", "<x>&'\"", "x" * 3000, "\ud800"])
def test_strange_names_are_to_the_schema(name: str) -> None:
    log = valid_sarif(sarif([SarifResult(name, name, name)], version="1.0", notes=[name], well=False))
    assert "\x1b" not in json.dumps(log, ensure_ascii=False)


@pytest.mark.parametrize(
    "broken",
    [
        {"version": "2.0.0", "runs": []},
        {"version": "2.1.0"},
        {"version": "2.1.0", "runs": [{"tool": {"driver": {}}}]},
        {"version": "2.1.0", "runs": [], "extra": 1},
    ],
)
def test_what_is_not_to_the_schema_is_seen(broken: dict[str, object]) -> None:
    with pytest.raises(AssertionError):
        valid_sarif(json.dumps(broken))
