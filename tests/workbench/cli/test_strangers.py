"""Every command on sessions of strangers: a result or one line that states what is wrong, and nothing that a terminal
obeys on stdout or stderr, whatever names, paths, notes and numbers there are."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import pytest

from lockstep.workbench.cli.main import run
from lockstep.workbench.exit_codes import Exit
from tests.sessions.oddities import ODDITIES, some_of_each
from tests.sessions.strangers import usual, write

#: What acts on a terminal or on the order of the text around it; lines end as usual.
OBEYED = re.compile("[\x00-\x09\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
#: A folder of a stranger's, whose name is as foreign as what lies in it.
FOLDER = "\x1b[2J\u202e[bold]\x07\u2028"
FIGURES = (("--attention", "0"), ("--biases", "0"), ("--tap", "*q_proj*"), ("--branch", "1", "--step", "1"))
QUICK = (
    ("foreign_names",),
    ("nothing_in_sequences", "one_infinity"),
    ("no_sequences", "shape_4"),
    ("no_taps",),
)


def harmless(capfd: pytest.CaptureFixture[str], *words: str, documents: bool = False) -> None:
    """The command ends with an exit code of its own (not of a defect). `documents`: stdout is a file's content."""
    code = run(list(words))
    out, err = capfd.readouterr()
    reported = err if documents else out + err
    assert code in (Exit.OK, Exit.DIVERGED, Exit.USAGE, Exit.CANNOT_LOAD, Exit.INCONCLUSIVE), (
        words,
        code,
        err,
    )
    assert code == Exit.OK or out or err, (words, code)
    assert not (found := OBEYED.search(reported)), (words, reported[max(0, found.start() - 60) :][:120])
    assert len(reported) < 200_000


def all_commands(capfd: pytest.CaptureFixture[str], path: Path, other: Path) -> None:
    name = str(path)
    for words in (("show", name), ("show", "--json", name), ("verify", name), ("verify", "--json", name)):
        harmless(capfd, "sessions", *words)
    for kind in ("html", "svg", "csv", "json", "junit"):
        harmless(capfd, "export", name, f"--{kind}", "-", documents=True)
    for figure in FIGURES:
        harmless(capfd, "export", name, "--svg", "-", *figure, documents=True)
    harmless(capfd, "diff", name, str(other))
    harmless(capfd, "diff", str(other), name, "--json")
    harmless(capfd, "replay", name, "--ex", "next", "--ex", "where", "--ex", "info taps", "--ex", "branches")
    harmless(capfd, "replay", name, "--ex", "export journal", "--ex", "topk", "--ex", "print text", "--json")


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("other") / "usual.session", usual())


@pytest.mark.sampled(2)
@pytest.mark.parametrize("oddities", QUICK, ids=" ".join)
def test_no_command_is_harmed(
    capfd: pytest.CaptureFixture[str], tmp_path: Path, other: Path, oddities: Sequence[str]
) -> None:
    made = usual()
    for oddity in oddities:
        ODDITIES[oddity](made)
    (tmp_path / FOLDER).mkdir()
    all_commands(capfd, write(tmp_path / FOLDER / "\x9b2J.session", made), other)


def test_sessions_of_a_folder_are_listed_packed_copied_and_removed(
    capfd: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Names of files are strings of strangers too, and so are those of what is none."""
    monkeypatch.setenv("LOCKSTEP_DATA_DIR", str(tmp_path / FOLDER))
    folder = tmp_path / FOLDER / "sessions"
    folder.mkdir(parents=True)
    path = write(folder / "\x9b2J\u202e.session", usual())
    (folder / "\x1b]0;owned\x07.session").write_bytes(b"no session")
    for words in (
        ("list",),
        ("list", "--json"),
        ("show", str(folder)),
        ("show", str(folder / "\x1b[2Jnone")),
    ):
        harmless(capfd, "sessions", *words)
    harmless(capfd, "sessions", "copy", str(path), str(folder / "\x07copy.session"))
    harmless(capfd, "sessions", "pack", str(path))
    harmless(capfd, "export", str(path), "--html", str(folder / "\x1b[31m.html"))
    harmless(capfd, "export", str(path), "--html", str(folder / "\x1b[31m" / "nowhere.html"))
    for file in sorted(folder.glob("*.session")):
        harmless(capfd, "sessions", "rm", "--yes", str(file))


@pytest.mark.slow
@pytest.mark.parametrize("oddity", some_of_each(4))
def test_no_command_is_harmed_by_any_of_it(
    capfd: pytest.CaptureFixture[str], tmp_path: Path, other: Path, oddity: str
) -> None:
    """What reads, exports and replays for the commands meets more of it in the tests of the debugger, and all in `make
    soak`."""
    made = usual()
    ODDITIES[oddity](made)
    all_commands(capfd, write(tmp_path / "stranger.session", made), other)
