"""`lockstep check RUN.session`: a recording of anybody's in the check's table, JSON, JUnit and CSV."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from lockstep.sessions import Session
from lockstep.workbench.cli.main import run
from lockstep.workbench.foreign.session import write_session
from lockstep.workbench.judgements.golden_event import last_golden_event
from tests.workbench.checking.test_foreign_verdict import edited
from tests.workbench.diagnosis.synthetic import Case, tiny_case
from tests.workbench.foreign.packed import Rows, packed

pytestmark = pytest.mark.sampled_file(2)


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    return tiny_case(tmp_path_factory.mktemp("check"), num_hidden_layers=1)


def recorded(case: Case, path: Path, *, wrong: bool = False, missing: bool = False) -> list[str]:
    """A foreign run's session, and the words that check it."""
    rows = Rows.of(case.floor)
    made = packed(rows, rows.decoding(), tp=2)
    if wrong:
        edited(made, "logits", lambda x: x[:, ::-1].copy())
    if missing:
        del made.by_rank[1]
    write_session(made, path, form="test")
    return ["check", str(path), "--model", str(case.model_dir), "--golden", str(case.golden.path)]


def test_a_recording_is_reported_as_a_run_of_ours_is(case: Case, tmp_path: Path, capsys: Any) -> None:
    words = recorded(case, tmp_path / "a.session")
    before = (tmp_path / "a.session").read_bytes()
    assert run(words) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "aligned 21/21 rows · 15 of 21 taps × 1 layer · 2/2 ranks · recorded eager"
    assert any(line.startswith("0     ·· ··") for line in lines)
    assert lines[-1].startswith("verdict     match: ")
    assert (tmp_path / "a.session").read_bytes() == before


def test_what_is_wrong_is_in_every_form(case: Case, tmp_path: Path, capsys: Any) -> None:
    words = recorded(case, tmp_path / "a.session", wrong=True)
    files = ["--junit", str(tmp_path / "a.xml"), "--csv", str(tmp_path / "a.csv")]
    assert run([*words, *files, "--save", str(tmp_path / "judged.session"), "--json"]) == 1
    reported = json.loads(capsys.readouterr().out)
    assert reported["coverage"]["aligned"] == 21
    assert reported["first_divergence"]["tap"] == "logits"
    verdict = ElementTree.parse(tmp_path / "a.xml").getroot()[0][0]
    assert "first wrong: logits" in verdict[0].attrib["message"]
    assert verdict[0].text is not None
    assert verdict[0].text.startswith("aligned 21/21 rows")
    assert "logits,fail" in (tmp_path / "a.csv").read_text()
    with Session.open(tmp_path / "judged.session") as session:
        event = last_golden_event(session, 0)
        assert event is not None
        assert event.coverage is not None
        assert event.coverage.rows == 21
        assert {one.verdict for one in session.verdicts(tap="logits")} == {"fail"}


def test_what_the_recording_does_not_carry_is_inconclusive(case: Case, tmp_path: Path, capsys: Any) -> None:
    words = recorded(case, tmp_path / "a.session", missing=True)
    assert run([*words, "--junit", str(tmp_path / "a.xml")]) == 6
    out = capsys.readouterr().out
    assert out.splitlines()[-1] == "verdict     inconclusive: rank 1 left no pass"
    assert ' message="inconclusive: rank 1 left no pass"' in (tmp_path / "a.xml").read_text()
    judged = str(tmp_path / "judged.session")
    assert run([*words, "--save", judged]) == 6
    assert run(["export", judged, "--html", str(tmp_path / "a.html")]) == 0
    report = (tmp_path / "a.html").read_text()
    assert "Inconclusive." in report
    assert "rank 1 left no pass" in report
    assert "Agrees with" not in report


@pytest.mark.parametrize(
    ("more", "printed"),
    [(("--fault", "mask=none"), "a recording is read as it is"), (("--model", "nowhere"), "nowhere")],
)
def test_what_does_not_go_with_a_recording_is_reported(
    case: Case, tmp_path: Path, capsys: Any, more: tuple[str, str], printed: str
) -> None:
    words = recorded(case, tmp_path / "a.session")
    assert run([*words[:2], *more]) in (2, 3)
    assert printed in " ".join(capsys.readouterr().err.split())


def test_a_model_takes_no_golden_session(tmp_path: Path, capsys: Any) -> None:
    assert run(["check", "demo", "--golden", str(tmp_path / "g.session")]) == 2
    assert "for a recording: give RUN.session in place of demo" in " ".join(capsys.readouterr().err.split())


def test_two_recordings_are_compared_once_their_rows_are_proved_the_same(
    case: Case, tmp_path: Path, capsys: Any
) -> None:
    for name, wrong in (("a", False), ("b", True)):
        recorded(case, tmp_path / f"{name}.session", wrong=wrong)
    paths = [str(tmp_path / f"{name}.session") for name in ("a", "b")]
    assert run(["diff", paths[0], paths[0]]) == 0
    assert run(["diff", *paths]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert [
        line for line in lines if line.startswith("aligned 21/21 rows · 15 of 21 taps × 1 layer")
    ] == lines[:1] * 2
    rows = Rows.of(case.floor)
    moved = edited(packed(rows, rows.decoding(), tp=2), "embed", lambda x: x[::-1].copy())
    write_session(moved, tmp_path / "c.session", form="test")
    assert run(["diff", paths[0], str(tmp_path / "c.session"), "--json"]) == 6
    reported = json.loads(capsys.readouterr().out)
    assert "misplaced" in reported["coverage"]["misplaced"]
    assert reported["verdict"] == "inconclusive"


def test_a_recording_and_its_golden_reference_are_judged(case: Case, tmp_path: Path, capsys: Any) -> None:
    recorded(case, tmp_path / "a.session", missing=True)
    assert run(["diff", str(tmp_path / "a.session"), str(case.golden.path)]) == 6
    out = capsys.readouterr().out
    assert out.startswith("aligned 21/21 rows · 15 of 21 taps × 1 layer · 1/2 ranks · recorded eager\n")
    assert "rank 1 left no pass" in out
    assert "within its noise" not in out
