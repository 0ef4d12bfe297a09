"""Trials of session files: bits turned over, files cut short, writers killed, power cut, disks full, strangers."""

from __future__ import annotations

import os
import random
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import seed as seeded
from hypothesis import strategies as st

from lockstep.sessions import Session, SessionError, SessionWriter
from lockstep.sessions.format import files
from lockstep.sessions.verify import verify
from tests.sessions import flips, test_crash, test_limits, test_one_writer
from tests.sessions.hostile_files import KINDS
from tests.sessions.oddities import ODDITIES
from tests.sessions.samples import record
from tests.sessions.strangers import usual, write
from tests.soak.trial import shared
from tests.workbench import test_fuzz_sessions
from tests.workbench.harmless import stands


@cache
def whole(log: bool) -> tuple[Path, flips.Shown]:
    """A session of everything, or one that its writer left with a log; and what is shown of it."""
    path = flips.recording(shared() / f"whole-{log}.session", finished=not log)
    return path, flips.shown(path)


def _copy(log: bool, directory: Path) -> Path:
    """A copy to be damaged."""
    path, original = directory / "a.session", whole(log)[0]
    shutil.copyfile(original, path)
    if log:
        shutil.copyfile(files.wal_of(original), files.wal_of(path))
    return path


def flip_bit(seed: int, directory: Path) -> None:
    """One bit of the file, in three of ten tries of its log."""
    log = seed % 10 >= 7
    path = _copy(log, directory)
    file = files.wal_of(path) if log else path
    byte, bit = list(flips.flips(file, 3, seed))[seed % 3]
    flips.flip(file, byte, bit)
    before, after = whole(log)[1], flips.shown(path)
    assert flips.silent(before, after) == [], f"bit {bit} of byte {byte} of {file.name}"
    assert verify(path) or not flips.changed(before, after), (
        f"bit {bit} of byte {byte} is no problem to verify"
    )


def truncate(seed: int, directory: Path) -> None:
    """Cut the file anywhere, every fourth time its log."""
    log = seed % 4 == 3
    path = _copy(log, directory)
    file = files.wal_of(path) if log else path
    length = random.Random(seed).randrange(file.stat().st_size)
    os.truncate(file, length)
    before, after = whole(log)[1], flips.shown(path)
    if not log:
        assert verify(path) != [], f"a file of {length} bytes is no problem to verify"
        assert flips.silent(before, after) == [], f"{length} bytes"
        return
    # A shorter log is an earlier moment: what is there was there.
    with Session.open(path) as session:
        for branch in session.branches():
            for step in session.own_steps(branch.id):
                at = f"step {step} of branch {branch.id}, statistics"
                assert after.places[at] == before.places[at], f"{at}; {length} bytes of log"


def kill_writer(seed: int, directory: Path) -> None:
    """Twice, the second time over what the first has left."""
    chance, path = random.Random(seed), directory / "a.session"
    for _ in range(2):
        test_crash.check_killed(path, test_crash.killed_writer(path, chance.uniform(0, 0.3)))
    SessionWriter.reopen(path).close()
    assert verify(path) == []
    assert [file.name for file in directory.glob("a.session*")] == ["a.session"]


def cut_power(seed: int, directory: Path) -> None:
    """A writer stopped at some moment, and of what the system had not been asked to put on the disk (fsync) only some
    sectors have got there."""
    chance, path, cut = random.Random(seed), directory / "a.session", directory / "cut.session"
    with subprocess.Popen(
        [sys.executable, "-c", test_crash.WRITER, str(path)], stdout=subprocess.PIPE, cwd=test_crash.ROOT
    ) as writer:
        assert writer.stdout is not None
        writer.stdout.readline()
        time.sleep(chance.uniform(0, 1.0))
        writer.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, writer.pid, os.WSTOPPED | os.WNOWAIT)
        synced = _synced(path)
        for at in ("", "-wal"):
            shutil.copyfile(f"{path}{at}", f"{cut}{at}")
        writer.kill()
        reported = int(writer.stdout.read().split(b"\n")[-2].decode() or 0)
    floor = _steps_within(cut, synced)
    _lose_sectors(files.wal_of(cut), synced, chance)
    with Session.open(cut) as session:
        steps = session.steps()
        assert floor <= len(steps) <= reported + 2, f"{len(steps)} steps; {floor} were on the disk"
        for step in steps:
            assert session.stats(step).tobytes() == record(step).stats.tobytes(), f"step {step}"
    problems = verify(cut)
    assert all(problem.startswith("incomplete: ") for problem in problems), problems
    if problems:  # reported; and it is not made to look whole
        try:
            SessionWriter.reopen(cut).close()
        except SessionError:
            return
        raise AssertionError(f"recorded on, although {problems[0]}")
    with SessionWriter.reopen(cut) as again:
        again.step(0, record(len(steps)))
    assert verify(cut) == []


def _synced(path: Path) -> int:
    """How many bytes of a growing session's log are on the disk for certain.

    By the WAL index (https://sqlite.org/walformat.html#wal_index_format): at byte 32 the log's salts, at 128 how many
    frames a checkpoint has begun to move, which it syncs first. A log that is just begun anew is not touched."""
    index, log = Path(f"{path}-shm").read_bytes(), files.wal_of(path).read_bytes()
    if len(log) < 32:  # just moved into the file, and cut
        return len(log)
    (moved,) = struct.unpack_from("=I", index, 128)
    (page,) = struct.unpack_from(">I", log, 8)
    begun_anew = index[32:40] != log[16:24]
    return len(log) if begun_anew else 32 + moved * (24 + page)


def _steps_within(path: Path, synced: int) -> int:
    """The steps that a session with so much of its log has."""
    probe = path.with_name("probe.session")
    for at in ("", "-wal"):
        shutil.copyfile(f"{path}{at}", f"{probe}{at}")
    os.truncate(files.wal_of(probe), synced)
    with Session.open(probe) as session:
        return len(session.steps())


def _lose_sectors(log: Path, synced: int, chance: random.Random) -> None:
    """Each sector after `synced` is lost (zeros) with some probability; a file may have grown without its content."""
    content, lost = bytearray(log.read_bytes()), chance.choice((0.0, 0.01, 0.1, 0.5, 1.0))
    for start in range(-(-synced // 512) * 512, len(content), 512):
        if chance.random() < lost:
            end = min(start + 512, len(content))
            content[start:end] = bytes(end - start)
    length = (
        len(content) if chance.random() < 0.5 else chance.randint(min(synced, len(content)), len(content))
    )
    log.write_bytes(content[:length])


def two_writers(seed: int, directory: Path) -> None:
    """A second process wants the file that a first one records to, at some step of it; then, by turns, the first is
    killed and a third records on."""
    chance, path = random.Random(seed), directory / "a.session"
    done = chance.randrange(40)
    with test_one_writer.writer_process(path) as first:
        assert test_one_writer.printed(first) == "open"
        for step in range(done):
            assert test_one_writer.do_step(first) == str(step)
        with test_one_writer.writer_process(path, chance.choice(("over", "new"))) as second:
            printed = test_one_writer.printed(second)
        assert printed.startswith("Session"), printed
        assert "open" not in printed.split(), printed
        assert test_one_writer.do_step(first) == str(done)
        if seed % 2:
            first.kill()
            first.wait()
    if seed % 2:
        with SessionWriter.reopen(path) as third:
            third.step(0, record(done + 1))
    assert verify(path) == []
    with Session.open(path) as session:
        assert session.steps() == range(done + 1 + seed % 2)
        for step in session.steps():
            assert session.stats(step).tobytes() == record(step).stats.tobytes(), f"step {step}"
    assert test_one_writer.names(path.parent) == sorted(
        ["a.session", "cache", "config", "data", "state", "tmp"]
    )


def fill_disk(seed: int, directory: Path) -> None:
    """Files may grow to a limit, one more than the last; then there is room again."""
    place = directory / "disk"
    place.mkdir()
    test_crash.test_a_full_disk_leaves_all_that_was_committed(place, 300_000 + 290_000 * seed)


def read_hostile(seed: int, directory: Path) -> None:
    """Within the memory and time that a session gets by default."""
    kind = KINDS[seed % len(KINDS)]
    (printed,) = test_limits.measured(directory, 512, 10.0, (kind,)).values()
    assert int(str(printed["peak_mib"])) <= 512 + test_limits.BASE_MIB, (kind, printed)


def read_odd(seed: int, directory: Path) -> None:
    """Read, verified, exported in every format, replayed with every command."""
    name = sorted(ODDITIES)[seed % len(ODDITIES)]
    made = usual()
    ODDITIES[name](made)
    stands(write(directory / "odd.session", made))


def _fuzz(
    examples: int, test: Callable[..., None], *strategies: st.SearchStrategy[object]
) -> Callable[[int, Path], None]:
    """Tries of so many examples, each of other ones."""

    def act(seed: int, directory: Path) -> None:
        limits = settings(
            max_examples=examples, derandomize=False, database=None, deadline=None, phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )  # fmt: skip
        seeded(seed)(limits(given(st.tuples(*strategies))(lambda drawn: test(*drawn))))()

    return act


def _values(made: object) -> None:
    with tempfile.TemporaryDirectory() as directory:
        stands(test_fuzz_sessions.tried(made, Path(directory, "stranger.session")))  # type: ignore[arg-type]


fuzz_values = _fuzz(5, _values, test_fuzz_sessions.strangers())
fuzz_bytes = _fuzz(
    10, test_fuzz_sessions._any_bytes, test_fuzz_sessions._FLIPS, st.just(1.0) | st.floats(0, 1)
)
fuzz_panes = _fuzz(
    2, lambda made: test_fuzz_sessions._any_panes(made, (160, 50)), test_fuzz_sessions.strangers()
)
