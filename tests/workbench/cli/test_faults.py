"""`lockstep faults`: the catalogue, and where each fault can act."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from lockstep.engine.faults.catalogue import DEFAULTS, FAULTS
from lockstep.workbench.cli.main import run
from tests.checkpoints import tiny_checkpoint
from tests.workbench.cli.terminal import Terminal


def test_every_fault_is_listed_with_its_rule(capsys: Any) -> None:
    assert run(["faults"]) == 0
    shown = capsys.readouterr().out
    assert run(["faults", "--json"]) == 0
    reported = json.loads(capsys.readouterr().out)
    assert [(one["name"], one["value"]) for one in reported] == [
        (fault.seam, fault.value) for fault in FAULTS
    ]
    for fault in FAULTS:  # names of our own stay inside
        assert not fault.source or re.fullmatch(r"[\w.-]+/[\w.-]+#\d+", fault.source)
    assert not set(reported[0]) & {"id", "patch"}
    assert "seed" not in shown
    for one in reported:
        assert f"{one['name']}={one['value']}" in shown
        assert one["title"] in shown
        assert one["default"] == DEFAULTS[one["name"]]


def test_a_word_narrows_the_list(capsys: Any) -> None:
    assert run(["faults", "ROPE", "--json"]) == 0
    some = json.loads(capsys.readouterr().out)
    assert 0 < len(some) < len(FAULTS)
    assert "rope_theta" in {one["name"] for one in some}
    assert all("rope" in " ".join(map(str, one.values())).casefold() for one in some)
    assert run(["faults", "mask=additive"]) == 0
    shown = capsys.readouterr().out
    assert re.findall(r"^  (\S+=\S+)", shown, re.MULTILINE) == ["mask=additive"]


def test_a_word_that_nothing_has_gets_a_suggestion(capsys: Any) -> None:
    assert run(["faults", "maks=none"]) == 2
    assert (
        "no fault has 'maks=none' in its name or description: did you mean mask=none"
        in capsys.readouterr().err
    )


def test_what_cannot_act_reports_why(capsys: Any, tmp_path: Path) -> None:
    model = str(tiny_checkpoint(tmp_path, "llama"))
    assert run(["faults", "--model", model, "--json"]) == 0
    reported = {f"{one['name']}={one['value']}": one for one in json.loads(capsys.readouterr().out)}
    assert not reported["load_bias=false"]["acts"]
    assert reported["load_bias=false"]["reason"] == "the model has no q/k/v biases"
    assert not reported["qkv_sizes=mixed"]["acts"]
    assert reported["mask=additive"]["acts"]
    assert run(["faults", "--model", model, "--tp", "2"]) == 0
    shown = capsys.readouterr().out
    assert shown.count("cannot act here") < sum(not one["acts"] for one in reported.values())
    assert run(["faults", "--model", model, "--tp", "3"]) == 2
    assert "tp=3" in capsys.readouterr().err


def test_a_terminal_has_it_in_two_columns(capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run(["faults"]) == 0
    whole = capsys.readouterr().out
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(sys, "stdout", Terminal())
    assert run(["faults"]) == 0
    shown = sys.stdout.getvalue()  # type: ignore[attr-defined]
    assert max(map(len, shown.splitlines())) <= 80
    assert shown.split() == whole.split()
    text = (
        "tokens attend to later ones: the prefill is wrong, a decode step only where a window is lost as well"
    )
    at = next(i for i, line in enumerate(shown.splitlines()) if "tokens attend to later ones: the" in line)
    assert all(line.startswith(" " * 28) for line in shown.splitlines()[at : at + 3])
    assert text in whole
