"""Temporary folders go with the last process that uses them; those of killed ones are swept, and nothing else is."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from lockstep.engine import scratch
from lockstep.engine.scratch import ScratchFolder, remove_once_left, sweep

ROOT = Path(__file__).resolve().parents[2]
_HOLDER = """
import sys, signal
from pathlib import Path
from lockstep.engine.scratch import ScratchFolder
folder = ScratchFolder.join(Path(sys.argv[2])) if len(sys.argv) > 2 else ScratchFolder.make("test", Path(sys.argv[1]))
(folder.path / "sub").mkdir(exist_ok=True)
(folder.path / "sub" / "file").write_text("x")
print(folder.path, flush=True)
signal.pause()
"""


def holder(*arguments: Path) -> tuple[subprocess.Popen[str], Path]:
    """A process that holds a folder."""
    process = subprocess.Popen(
        [sys.executable, "-c", _HOLDER, *map(str, arguments)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    return process, Path(process.stdout.readline().strip())


def kill(process: subprocess.Popen[str]) -> None:
    with process:
        process.send_signal(signal.SIGKILL)


@pytest.fixture(autouse=True)
def anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process sweeps each place once."""
    monkeypatch.setattr(scratch, "_swept", set())


def test_a_folder_goes_though_something_is_put_into_it_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, remove = ScratchFolder.make("test", tmp_path), os.unlink

    def late(name: str, dir_fd: int) -> None:
        with contextlib.suppress(FileNotFoundError):
            (folder.path / "late").write_text("of a thread that is still running")
        remove(name, dir_fd=dir_fd)

    monkeypatch.setattr(os, "unlink", late)
    folder.close()
    assert list(tmp_path.iterdir()) == []


def test_what_killed_processes_left_is_swept_and_what_is_held_is_not(tmp_path: Path) -> None:
    first, path = holder(tmp_path)
    second, same = holder(tmp_path, path)
    assert same == path
    kill(first)
    ScratchFolder.make("test", tmp_path).close()
    assert (path / "sub" / "file").exists(), "the second still holds it"
    kill(second)
    sweep(tmp_path)
    assert path.exists(), "a place is swept once a process"
    scratch._swept.clear()
    with ScratchFolder.make("other", tmp_path) as own:
        assert [*tmp_path.iterdir()] == [own.path]
    assert [*tmp_path.iterdir()] == []


def test_the_last_to_leave_removes_the_folder(tmp_path: Path) -> None:
    made = ScratchFolder.make("test", tmp_path)
    joined = ScratchFolder.join(made.path)
    made.close()
    made.close()
    assert made.path.exists()
    joined.close()
    assert not made.path.exists()
    with pytest.raises(FileNotFoundError):
        ScratchFolder.join(made.path)
    remove_once_left(made.path)


def test_nothing_is_removed_that_is_not_known_to_be_ours(tmp_path: Path) -> None:
    """By name alone, by an owner file of somebody else's, through a link, or through what lies in the folder."""
    place = tmp_path / "place"
    place.mkdir()
    (kept := tmp_path / "kept").mkdir()
    (kept / "file").write_text("precious")
    (place / "lockstep-experiments").mkdir()
    (place / "lockstep-notes").mkdir()
    (place / "lockstep-notes" / "owner").write_text("me")
    (place / "lockstep-file").write_text("")
    ours = ScratchFolder.make("test", tmp_path)
    (place / "lockstep-link").symlink_to(ours.path)
    (place / "lockstep-pipe").mkdir()
    os.mkfifo(place / "lockstep-pipe" / "owner")
    left = ScratchFolder.make("left", place)
    (left.path / "link").symlink_to(kept)
    left._opened.close()
    ours._opened.close()
    before = {path.name for path in place.iterdir()}
    scratch._swept.clear()
    sweep(place)
    assert {path.name for path in place.iterdir()} == before - {left.path.name}
    assert (kept / "file").read_text() == "precious"
    assert ours.path.exists()


def test_a_folder_that_is_swept_while_it_is_made_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between its owner file and the lock on that."""
    lock, met = scratch.fcntl.flock, []

    def late(descriptor: int, how: int) -> None:
        if not met:
            met.extend(tmp_path.iterdir())
            scratch._swept.clear()
            sweep(tmp_path)
        lock(descriptor, how)

    monkeypatch.setattr(scratch.fcntl, "flock", late)
    with ScratchFolder.make("test", tmp_path) as folder:
        assert len(met) == 1
        assert not met[0].exists()
        assert [*tmp_path.iterdir()] == [folder.path]
