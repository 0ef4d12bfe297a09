"""What is reported of another engine's session: which engine it was. Of rules that were in force nothing is known."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

from lockstep.sessions import Session, SessionWriter, VerdictRecord
from lockstep.workbench.cli.main import run
from lockstep.workbench.foreign.importing import import_run
from lockstep.workbench.foreign.readers.lockstep import LockstepDump
from lockstep.workbench.judgements.golden_event import KIND, GoldenEvent, plain
from lockstep.workbench.tui.screens.status import status_facts
from lockstep.workbench.views.branches import branch_lines
from lockstep.workbench.views.overview import overview, present
from lockstep.workbench.views.source import SessionSource
from lockstep.workbench.views.where import Where
from tests.workbench.foreign.readers.tape_dump import dump


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


def test_no_list_calls_its_rules_correct(
    session: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lockstep.workbench.paths._sessions", lambda: session.parent)
    replay = ["replay", str(session), "--batch", "--ex", "where", "--ex", "branches"]
    for words in (["sessions", "list"], ["sessions", "show", str(session)], replay):
        assert run(words) == 0
        shown = capsys.readouterr().out
        assert "mine␛ 0.1" in shown
        assert "correct" not in shown
        assert words[0] == "replay" or "recorded from mine␛ 0.1" in shown, (
            "no engine under the title of faults"
        )
    with Session.open(session) as opened:
        (line,) = branch_lines(opened)
    assert line.summary("all correct") == "recorded from mine␛ 0.1, eager"


def test_a_step_of_a_run_that_carries_no_verdict_is_no_match(session: Path) -> None:
    """Each of its taps may be right, as where a rank left nothing."""
    for verdict, shown in (("match", "golden: ✓ match"), ("inconclusive", "golden: inconclusive")):
        event = msgspec.convert({"verdict": verdict}, GoldenEvent)
        with SessionWriter.reopen(session) as writer:
            writer.verdicts([VerdictRecord(0, 0, "embed", "pass", {})])
            writer.event(0, 0, KIND, verdict, plain(event))
        with Session.open(session) as opened:
            source, here = SessionSource(opened), Where(0, 0)
            _, (_, right) = status_facts(overview(source), here, present(source, here), None)
        assert right[0].text == shown


def test_a_replay_reports_how_it_is_judged_and_what_was_not_compared(
    session: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """No live run can be begun from it."""
    assert run(["replay", str(session), "--batch", "--ex", "golden"]) == 2
    reported = "".join(capsys.readouterr())
    assert (
        "never held against a golden reference: `lockstep check run.session --model MODEL --save JUDGED.session` does"
        in reported
    )
    assert run(["replay", str(session), "--batch", "--ex", "next", "--ex", "split"]) == 2
    reported = "".join(capsys.readouterr())
    assert (
        "nothing to put beside this branch: `lockstep check run.session --model MODEL` records a" in reported
    )
    events = {
        "match": "nothing to explain: every operation that was judged is right on its own inputs",
        "inconclusive": "inconclusive: nothing that is wrong was found, and that all is right cannot be shown",
    }
    for verdict, stated in events.items():
        event = msgspec.convert({"verdict": verdict, "reference": ""}, GoldenEvent)
        with SessionWriter.reopen(session) as writer:
            writer.event(0, 0, KIND, verdict, plain(event))
        assert run(["replay", str(session), "--batch", "--ex", "golden", "--ex", "diagnose"]) == 0
        reported = capsys.readouterr().out
        assert f"no reference, operations on their own inputs: {verdict} over" in reported
        assert stated in reported
        assert "matches" not in reported


def test_the_debugger_compares_row_by_row(
    session: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As `lockstep diff` does: the passes of the two need not be the same."""
    assert run(["diff", str(session), str(session)]) == 0
    reported = capsys.readouterr().out
    assert "read the same tokens" in reported
    assert run(["replay", str(session), "--batch", "--ex", f"diff 0 {session}"]) == 0
    assert reported.strip() in capsys.readouterr().out
