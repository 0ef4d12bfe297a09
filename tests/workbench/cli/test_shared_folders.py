"""Commands that write into a folder where somebody else can rename what lies there."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from lockstep.workbench.cli import export as exporting
from lockstep.workbench.cli.main import run
from lockstep.workbench.tui import screenshots
from lockstep.workbench.tui.screenshots import ExportError, Screenshot
from tests.workbench.export import made

#: What somebody else does there at the worst moment: every folder becomes a link to another of the victim's.
_EXCHANGE = """
import pathlib, sys
shared, precious = map(pathlib.Path, sys.argv[1:])
for number, entry in enumerate(path for path in shared.iterdir() if path.is_dir()):
    entry.rename(shared / f"taken{number}")
    entry.symlink_to(precious)
"""


@pytest.fixture
def shared(tmp_path: Path) -> Path:
    place = tmp_path / "shared"
    place.mkdir()
    place.chmod(0o777)
    return place


@pytest.fixture
def precious(tmp_path: Path) -> Path:
    folder = tmp_path / "precious"
    (folder / "sub").mkdir(parents=True)
    (folder / "sub" / "file").write_text("precious")
    return folder


@pytest.mark.parametrize(
    "words",
    [
        lambda shared, good: ["attach", "-o", str(shared / "run.session")],
        lambda shared, good: ["regress", "--baseline", str(good), "-o", str(shared / "run.session")],
    ],
    ids=["attach", "regress"],
)
def test_an_engine_that_is_attached_to_while_folders_are_exchanged(
    words: Callable[[Path, Path], list[str]], shared: Path, precious: Path, tmp_path: Path
) -> None:
    """Between the check of the folder and its removal lies the whole run of the command."""
    good = made.build(tmp_path / "good.session")
    command = [sys.executable, "-c", _EXCHANGE, str(shared), str(precious)]
    assert run([*words(shared, good), "--", *command]) == 3  # it is no engine
    assert (precious / "sub" / "file").read_text() == "precious"
    assert list(shared.iterdir()) == []


def test_an_export_while_folders_are_exchanged(
    shared: Path, precious: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put = exporting._put

    def late(*arguments: object) -> None:
        put(*arguments)  # type: ignore[arg-type]
        subprocess.run([sys.executable, "-c", _EXCHANGE, str(shared), str(precious)], check=True)

    monkeypatch.setattr(exporting, "_put", late)
    session = made.build(tmp_path / "a.session")
    assert run(["export", str(session), "--csv", str(shared / "out.csv")]) == 0
    assert (precious / "sub" / "file").read_text() == "precious"
    assert [path.name for path in shared.iterdir()] == ["out.csv"]


def test_a_picture_of_the_screens_is_not_written_through_a_link(shared: Path, tmp_path: Path) -> None:
    """The name of the file that becomes it can be guessed."""
    (victim := tmp_path / "victim").write_text("precious")
    (shared / f".shot.svg.{os.getpid()}").symlink_to(victim)
    with suppress(ExportError):
        screenshots.write(Screenshot("title", None, ((),), "#000000"), shared / "shot.svg")
    assert victim.read_text() == "precious"
