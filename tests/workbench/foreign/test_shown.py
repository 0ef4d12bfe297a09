"""What is said of another engine's session: which engine it was. Of rules that were in force nothing is known."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sessions import Session
from tests.workbench.foreign.readers.tape_dump import dump
from workbench.cli.main import run
from workbench.foreign.importing import import_run
from workbench.foreign.readers.lockstep import LockstepDump
from workbench.tui.screens.status import status_facts
from workbench.views.overview import overview
from workbench.views.source import SessionSource
from workbench.views.where import Where


@pytest.fixture
def session(tmp_path: Path) -> Path:
    folder = dump(tmp_path / "dump", {"engine": "mine\x1b[31m 0.1", "mode": "eager"})
    path = tmp_path / "run.session"
    import_run(LockstepDump.open(folder), path, form="lockstep")
    return path


def test_the_header_names_the_engine(session: Path) -> None:
    with Session.open(session) as opened:
        known = overview(SessionSource(opened))
    assert known.engine == "mine␛ 0.1, eager"
    _, (left, _) = status_facts(known, Where(0, 0), None, None)
    assert [fact.text for fact in left] == ["recorded from mine␛ 0.1, eager"]


def test_sessions_show_names_the_engine(session: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["sessions", "show", str(session)]) == 0
    shown = capsys.readouterr().out
    assert "recorded from mine␛ 0.1, eager; 1 taps" in shown
    assert "rules correct" not in shown
    assert run(["sessions", "show", str(session), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["engine"] == "mine␛ 0.1, eager"
