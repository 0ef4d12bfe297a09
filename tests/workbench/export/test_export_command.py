"""`lockstep export`: every kind of file, and every way to ask for what cannot be."""

from __future__ import annotations

import csv
import io
import json
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from lockstep.sessions import Session
from lockstep.workbench.cli.main import run
from lockstep.workbench.debugger.errors import CommandError, DebuggerError
from lockstep.workbench.debugger.host.replay import open_replay
from tests.workbench.export import made

pytestmark = pytest.mark.sampled_file(2)


@pytest.fixture
def session(tmp_path: Path) -> Path:
    path = made.build(tmp_path / "a.session", other=(30, 31, 32))
    made.judge(path)
    return path


def test_all_kinds_at_once(session: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    html, svg, table, document, tests = (tmp_path / f"out.{e}" for e in ("html", "svg", "csv", "json", "xml"))
    words = ["--html", html, "--svg", svg, "--csv", table, "--json", document, "--junit", tests]
    assert run(["export", str(session), *map(str, words), "--attention", "1:2"]) == 0
    assert html.read_text(encoding="utf-8").startswith("<!doctype html>")
    assert "layer 1, step 3" in svg.read_text(encoding="utf-8")
    rows = list(csv.DictReader(io.StringIO(table.read_text(encoding="utf-8"))))
    assert len(rows) == 5 * len(made.TAPS) * 2
    with Session.open(session) as opened:
        stats = opened.stats(3)
    assert stats is not None
    row = next(r for r in rows if (r["step"], r["tap"], r["rank"]) == ("3", "logits", "1"))
    assert float(row["rms"]) == pytest.approx(float(stats[-1, 1, 3]), rel=1e-6)
    assert (row["verdict"], row["rel_l2"], row["checksum"]) == ("fail", "0.3", f"{10:016x}")
    reported = json.loads(
        document.read_text(), parse_constant=lambda word: pytest.fail(f"{word} is not JSON")
    )
    assert reported["judgement"]["first"]["tap"] == "layers.0.attn.probs"
    assert [h["head"] for h in reported["attention"][0]["heads"]] == [2]
    root = ElementTree.fromstring(tests.read_bytes())
    assert (root.get("tests"), root.get("failures")) == (str(4 * len(made.TAPS)), str(len(made.TAPS) - 2))
    stated = capsys.readouterr()
    assert stated.out == ""
    assert stated.err.count("wrote") == 5


def test_what_a_killed_export_has_left_goes_with_the_next(session: Path, tmp_path: Path) -> None:
    killed = (
        "import os, sys, pathlib; from lockstep.engine.scratch import ScratchFolder;"
        "folder = ScratchFolder.make('export', pathlib.Path(sys.argv[1]));"
        "(folder.path / 'out.csv').write_text('half'); os.kill(os.getpid(), 9)"
    )
    root = Path(__file__).resolve().parents[3]
    subprocess.run([sys.executable, "-c", killed, str(tmp_path)], check=False, cwd=root)
    assert len([*tmp_path.glob("lockstep-export-*")]) == 1
    assert run(["export", str(session), "--csv", str(tmp_path / "out.csv")]) == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.session", "out.csv"]


def test_data_goes_to_stdout(session: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--csv", "-", "--tap", "layers.*.attn.q_proj", "--step", "2", "--branch", "load_bias=false"]
    assert run(["export", str(session), *arguments]) == 0
    header, *rows = csv.reader(io.StringIO(capsys.readouterr().out))
    assert header[:5] == ["branch", "step", "tap", "layout", "rank"]
    assert [r[:3] for r in rows] == [
        ["load_bias=false", "2", f"layers.{i}.attn.q_proj"] for i in (0, 0, 1, 1)
    ]  # fmt: skip


def test_the_figure_as_pixels(session: Path, tmp_path: Path) -> None:
    out = tmp_path / "x.png"
    assert run(["export", str(session), "--png", str(out)]) == 0
    assert out.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def test_the_debugger_writes_the_same_files(session: Path, tmp_path: Path) -> None:
    page, other = tmp_path / "a.html", tmp_path / "b.html"
    assert run(["export", str(session), "--html", str(page), "--branch", "main", "--step", "2"]) == 0
    with open_replay(session) as debugger:
        debugger.execute("goto 2")
        debugger.execute(f"export html {other}")
        assert other.read_text() == page.read_text()
        assert "testsuites" in debugger.execute("export junit").to_text()
        with pytest.raises(DebuggerError, match="exists"):
            debugger.execute(f"export html {other}")
        with pytest.raises(CommandError, match="needs a file"):
            debugger.execute("export png")


def test_figures_by_what_is_asked_for(session: Path, tmp_path: Path) -> None:
    out = tmp_path / "x.svg"
    for arguments, label in (
        ([], "Relative L2 error"),
        (["--tap", "*residual"], "rms over steps"),
        (["--attention", "0"], "layer 0, step 3"),
    ):
        assert run(["export", str(session), "--svg", str(out), *arguments]) == 0
        title = ElementTree.fromstring(out.read_bytes())[0].text or ""
        assert title.startswith(label)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "name what to write"),
        (["--csv", "-", "--tap", "nope*"], "no tap matches"),
        (["--csv", "-", "--step", "99"], "has 5 steps"),
        (["--json", "-", "--step", "99"], "steps 0 to 4, not 99"),
        (["--json", "-", "--branch", "nope"], "the session has main, load_bias=false"),
        (["--json", "-", "--attention", "x"], "LAYER or LAYER:HEAD"),
        (["--svg", "-", "--attention", "9"], "nothing to draw"),
        (["--junit", "-", "--branch", "1"], "nothing of this session was judged"),
        (["--html", "/nowhere/at/all.html"], "no directory that exists"),
        (["--html", "-", "--json", "-"], "name the same file"),
    ],
)
def test_usage_errors_are_one_clear_line(
    session: Path, arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["export", str(session), *arguments]) == 2
    stated = capsys.readouterr()
    assert stated.out == ""
    assert words in stated.err
    assert stated.err.count("\n") == 1


def test_no_session_is_ever_overwritten(session: Path, tmp_path: Path) -> None:
    other = made.build(tmp_path / "b.session")
    before = session.read_bytes(), other.read_bytes()
    for target in (session, other):
        assert run(["export", str(session), "--html", str(target)]) == 2
    assert (session.read_bytes(), other.read_bytes()) == before
    assert run(["export", str(tmp_path / "c.session"), "--html", str(tmp_path / "c.html")]) == 3
    assert not list(tmp_path.glob(".*"))


def test_an_export_loads_neither_torch_nor_textual(session: Path, tmp_path: Path) -> None:
    code = (
        "import sys; from lockstep.workbench.cli.main import run\n"
        f"assert run(['export', {str(session)!r}, '--html', {str(tmp_path / 'o.html')!r}]) == 0\n"
        "assert not {'torch', 'textual', 'transformers'} & sys.modules.keys()"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
