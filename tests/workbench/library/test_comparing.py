"""`lockstep.diff`: what the command prints, as a value that is true where nothing differs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import lockstep
from lockstep.workbench.cli.main import run
from tests.sessions.strangers import usual, write
from tests.workbench.library.safe_html import Shown

RECORDED = Path(__file__).resolve().parents[3] / "sessions" / "recorded"
A, B = (RECORDED / f"{name}.session" for name in ("load_bias-false", "rope-swallowed"))


def test_equal_runs_are_true() -> None:
    found = lockstep.diff(A, A)
    assert found
    assert (found.verdict, list(found.rows)) == ("match", [])
    assert "no row differs" in Shown(found._repr_html_()).text


def test_unequal_runs_are_false_and_the_first_operation_is_named() -> None:
    found = lockstep.diff(str(A), lockstep.open(B))
    assert not found
    assert found.rows[0][0] == "layers.0.attn.probs"
    assert repr(found).startswith("<RunDiff diverged: 20 rows of 1 sequence")
    assert "the first with equal inputs and unequal output: layers.0.attn.probs" in found.summary
    shown = Shown(found._repr_html_())
    assert {*found.columns, "layers.0.attn.probs"} <= set(shown.texts)


def test_the_command_prints_the_same(capsys: Any) -> None:
    found = lockstep.diff(A, B)
    assert run(["diff", str(A), str(B), "--json"]) == 1
    assert json.loads(capsys.readouterr().out) == json.loads(json.dumps(found.to_json()))
    assert run(["diff", str(A), str(B)]) == 1
    assert capsys.readouterr().out == f"{found}\n"


def test_a_session_that_was_open_stays_open() -> None:
    with lockstep.open(A) as opened:
        lockstep.diff(opened, B)
        assert opened.tokens().chosen


def test_what_cannot_be_compared_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(lockstep.SessionError, match="nowhere"):
        lockstep.diff(A, tmp_path / "nowhere.session")
    with pytest.raises(lockstep.DebuggerError, match="different tokens from the first"):
        lockstep.diff(A, write(tmp_path / "other.session", usual()))
