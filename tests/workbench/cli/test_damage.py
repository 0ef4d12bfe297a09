"""A damaged recording on the command line: what is lost is reported by every command, the rest is shown."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from lockstep.workbench.cli.main import run
from tests.sessions.samples import tamper
from tests.workbench.debugger.host.test_replay import RECORDED

OLD = Path(__file__).parents[2] / "sessions" / "data" / "version_2.session"
LOST = "event 3: its checksum does not match"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A shipped recording in whose journal and at whose step 2 something has changed."""
    path = Path(shutil.copyfile(RECORDED / "load_bias-false.session", tmp_path / "a.session"))
    return tamper(
        path,
        "UPDATE events SET text = 'another' WHERE id = 3",
        "UPDATE sequences SET emitted = emitted + 1 WHERE branch = 0 AND step = 2",
        sealed=False,
    )


def test_show_list_and_verify_report_it(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["sessions", "show", str(path)]) == 0
    reported = capsys.readouterr().out
    assert "state: damaged" in reported
    assert LOST in reported
    assert run(["sessions", "verify", str(path)]) == 1
    reported = capsys.readouterr().out
    assert LOST in reported
    assert "step 2 of branch 0, sequence 0: its checksum does not match" in reported


def test_a_replay_reports_it_and_goes_on(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["replay", str(path), "--ex", "goto 1", "--ex", "where"]) == 0
    reported = capsys.readouterr()
    assert f"a.session is damaged: {LOST}" in reported.err
    assert "step 1" in reported.out
    assert run(["replay", str(path), "--ex", "goto 2", "--ex", "where"]) != 0
    assert "step 2 of branch 0, sequence 0: its checksum does not match" in capsys.readouterr().err


def test_exports_report_it(path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for option in ("--junit", "--csv"):
        assert run(["export", str(path), option, str(tmp_path / "out")]) == 0
        assert LOST in capsys.readouterr().err
    for option in ("--junit", "--json", "--html"):
        assert run(["export", str(path), option, str(tmp_path / "out")]) == 0
        assert LOST in (tmp_path / "out").read_text()
    assert "step 2 of branch 0, sequence 0: its checksum does not match" in (tmp_path / "out").read_text()


def test_what_has_no_checksums_is_not_protected(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = shutil.copyfile(OLD, tmp_path / "a.session")
    for command in ("show", "verify"):
        assert run(["sessions", command, str(path)]) == 0
        assert "not protected" in capsys.readouterr().out
    assert run(["sessions", "pack", str(path)]) == 0
    assert run(["sessions", "verify", str(path)]) == 0
    assert capsys.readouterr().out.endswith("a.session: ok\n")
    assert run(["sessions", "show", str(path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["protected"] is True
