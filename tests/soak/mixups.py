"""Trials of sessions whose files are mixed up: logs of others, several names for one file, dates that are wrong."""

from __future__ import annotations

import itertools
import os
import random
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from unittest import mock

from lockstep.sessions import Session, SessionError, SessionWriter
from lockstep.sessions.compact import compact
from lockstep.sessions.copy import copy
from lockstep.sessions.format import files
from lockstep.sessions.salvage import salvage
from lockstep.sessions.state import foreign_log as foreign
from lockstep.sessions.state import state_of
from lockstep.sessions.verify import verify
from tests.sessions import test_clock, test_foreign_log, test_one_writer
from tests.sessions.samples import create, record, write

_DAY = 86_400.0


def foreign_log(seed: int, directory: Path) -> None:
    """A session with a log beside it that is not its own: whole, cut short, or with an index. It is read, then packed,
    copied or recorded on."""
    chance = random.Random(seed)
    path, steps = directory / "run.session", chance.randrange(1, 40)
    mix = _MIXED[seed % len(_MIXED)]
    mix(path, steps, chance)
    log = files.wal_of(path)
    if mix is not _both_killed and chance.random() < 0.3:
        os.truncate(log, chance.randrange(1, log.stat().st_size))
    if chance.random() < 0.5:
        Path(f"{path}-shm").write_bytes(chance.randbytes(32768))
    content = log.read_bytes()
    with Session.open(path) as session:
        assert "is the log of another session" in foreign(session)
    if mix is _both_killed:
        _is_incomplete(path)
        assert log.read_bytes() == content
        return
    assert (_steps(path), verify(path)) == (steps, [])
    chance.choice((compact, _recorded_on, _copied))(path)
    assert (_steps(path) in (steps, steps + 1), verify(path)) == (True, [])
    beside = [file.read_bytes() for file in directory.glob("run.session-*")]
    assert content in beside, "the log of the other is lost"


def _is_incomplete(path: Path) -> None:
    """Its own log is missing: nothing may make it look whole."""
    assert _state(path) == "incomplete"
    for change in (_recorded_on, compact, _copied):
        try:
            change(path)
        except SessionError:
            continue
        raise AssertionError(f"{change.__name__} although its log is missing")
    salvage(path, path.with_name("whole.session"))
    assert verify(path.with_name("whole.session")) == []


def _killed_run(path: Path, steps: int, chance: random.Random) -> None:
    """A good session takes the name of a killed run."""
    test_foreign_log.killed(path, chance.randrange(1, 40))
    write(path.with_name("good.session"), steps).replace(path)


def _continued(path: Path, steps: int, chance: random.Random) -> None:
    """A backup takes the name of the run that went on from it, and was killed."""
    write(path, steps)
    shutil.copy(path, path.with_name("good.session"))
    test_foreign_log.killed(path, steps + chance.randrange(1, 9))
    path.with_name("good.session").replace(path)


def _older_copy(path: Path, steps: int, chance: random.Random) -> None:
    """The log of an older copy beside the session that was closed meanwhile."""
    test_foreign_log.killed(path, chance.randrange(1, steps + 1))
    shutil.copy(files.wal_of(path), path.with_name("older"))
    with SessionWriter.reopen(path) as writer:
        for step in range(writer.next_step(0), steps):
            writer.step(0, record(step))
    path.with_name("older").replace(files.wal_of(path))


def _both_killed(path: Path, steps: int, chance: random.Random) -> None:
    """Of two killed runs one takes the other's name, without its log."""
    test_foreign_log.killed(path, chance.randrange(1, 40))
    test_foreign_log.killed(path.with_name("good.session"), steps).replace(path)


_MIXED: tuple[Callable[[Path, int, random.Random], None], ...] = (
    _killed_run,
    _continued,
    _older_copy,
    _both_killed,
)


def _steps(path: Path) -> int:
    """How many steps it has, each bit for bit what was recorded."""
    with Session.open(path) as session:
        for step in session.steps():
            assert session.stats(step).tobytes() == record(step).stats.tobytes(), f"step {step}"
        return len(session.steps())


def _state(path: Path) -> str:
    with Session.open(path) as session:
        return state_of(session)


def _recorded_on(path: Path) -> None:
    with SessionWriter.reopen(path) as writer:
        writer.step(0, record(writer.next_step(0)))


def _copied(path: Path) -> None:
    copy(path, path.with_name("copy.session"))
    assert _steps(path.with_name("copy.session")) == _steps(path)


def links_writers(seed: int, directory: Path) -> None:
    """While one records, others want the same file by a second name, by a link to it, by a link to its folder."""
    chance, folder = random.Random(seed), directory / "folder"
    folder.mkdir()
    path, steps = folder / "a.session", chance.randrange(2, 30)
    other, link = (directory if seed % 2 else folder) / "b.session", folder / "link.session"
    (directory / "linked").symlink_to(folder)
    link.symlink_to(path)
    with test_one_writer.writer_process(path) as first:
        assert test_one_writer.printed(first) == "open"
        os.link(path, other)
        for step in range(steps):
            assert test_one_writer.do_step(first) == str(step)
            if chance.random() < 0.2:
                files.lock_of(other).touch()
            _no_second_writer(chance.choice((other, link, directory / "linked" / "a.session")))
        if seed % 3 == 0:
            first.kill()
            first.wait()
    if seed % 3 == 0:
        other.unlink()
        SessionWriter.reopen(path).close()
    for name in filter(Path.exists, (path, other)):
        assert (_steps(name), verify(name)) == (steps, [])


def _no_second_writer(name: Path) -> None:
    try:
        SessionWriter.reopen(name).close()
    except SessionError:
        return
    raise AssertionError(f"a second writer by the name {name.name}")


def clock(seed: int, directory: Path) -> None:
    """The clock jumps by up to two days either way before each step, and so do the dates of the files."""
    chance, path, usual = random.Random(seed), directory / "a.session", time.time
    jumps = (chance.uniform(-2 * _DAY, 2 * _DAY) for _ in itertools.count())
    steps = chance.randrange(1, 140)

    def jumping() -> float:
        return usual() + next(jumps)

    with mock.patch.object(time, "time", jumping):
        with create(path) as writer, Session.open(path) as session:
            for step in range(steps):
                writer.step(0, record(step))
                test_clock.jump(chance.choice(list(directory.glob("a.session*"))), next(jumps))
                assert session.refresh()
                assert session.steps() == range(step + 1)
        test_clock.jump(path, next(jumps))
        _recorded_on(path)
        compact(path)
    assert (_steps(path), verify(path), _state(path)) == (steps + 1, [], "closed")
