"""A recording is for its user alone, unless that user decides otherwise."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from lockstep.sessions import SessionWriter
from lockstep.sessions.compact import compact
from lockstep.sessions.copy import copy
from lockstep.sessions.format import files
from tests.sessions.samples import as_version, create, record, write


@pytest.fixture(autouse=True)
def usual_umask() -> Iterator[None]:
    before = os.umask(0o022)
    yield
    os.umask(before)


def modes(path: Path) -> set[int]:
    """Of the session and of what SQLite has beside it."""
    return {files.mode_of(one) for one in (path, *files.companions(path)) if one.exists()}


def test_a_new_recording_is_private_with_its_log(tmp_path: Path) -> None:
    path = tmp_path / "a.session"
    with create(path) as writer:
        writer.step(0, record(0))
        assert path.with_name("a.session-wal").exists()
        assert path.with_name("a.session-shm").exists()
        assert modes(path) == {0o600}
        copy(path, tmp_path / "copy.session")
    assert modes(path) == modes(tmp_path / "copy.session") == {0o600}


def test_one_that_is_there_keeps_its_mode(tmp_path: Path) -> None:
    path = tmp_path / "a.session"
    write(path, 1)
    path.chmod(0o640)
    with SessionWriter.reopen(path) as writer:
        writer.step(0, record(1))
        assert modes(path) == {0o640}
    before = path.stat().st_ino
    compact(path)
    assert path.stat().st_ino != before
    assert modes(path) == {0o640}


def test_one_of_an_earlier_version_keeps_its_mode(tmp_path: Path) -> None:
    path = tmp_path / "old.session"
    write(path, 2)
    as_version(path, 1)
    path.chmod(0o640)
    assert compact(path).converted
    assert modes(path) == {0o640}


@pytest.mark.parametrize("there", ["link", "file"])
def test_nothing_that_is_there_is_taken_for_a_new_file(tmp_path: Path, there: str) -> None:
    path, victim = tmp_path / "a", tmp_path / "victim"
    path.symlink_to(victim) if there == "link" else path.touch()
    with pytest.raises(FileExistsError):
        files.create(path)
    assert not victim.exists()
