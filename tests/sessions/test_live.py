"""Reading while somebody writes: in this process, in another, in several threads."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from lockstep.sessions import Session, SessionWriter, StepRecord
from lockstep.sessions.format.schema import CHUNK_STEPS
from lockstep.sessions.state import state_of
from lockstep.sessions.verify import verify
from tests.sessions.samples import create, record, write

ROOT = Path(__file__).parents[2]

WRITER = """
import sys
from pathlib import Path
from tests.sessions.samples import create, record
with create(Path(sys.argv[1])) as writer:
    for line in sys.stdin:
        for step in range(writer.next_step(0), int(line)):
            writer.step(0, record(step))
        print(line, end="", flush=True)
"""


def same(session: Session, step: int) -> bool:
    expected: StepRecord = record(step)
    stats, sums = session.stats(step), session.checksums(step)
    return stats.tobytes() == expected.stats.tobytes() and sums.tobytes() == expected.checksums.tobytes()


def test_a_reader_follows_a_writer_in_another_process(tmp_path: Path) -> None:
    path = tmp_path / "a.session"
    with subprocess.Popen(
        [sys.executable, "-c", WRITER, str(path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        cwd=ROOT,
    ) as process:

        def write_until(steps: int) -> None:
            process.stdin.write(f"{steps}\n")
            process.stdin.flush()
            assert process.stdout.readline() == f"{steps}\n"

        write_until(1)
        session = Session.open(path)
        assert not session.refresh()
        for steps in (2, CHUNK_STEPS - 1, CHUNK_STEPS, CHUNK_STEPS + 1, 3 * CHUNK_STEPS + 1):
            write_until(steps)
            assert len(session.steps()) < steps
            assert session.refresh()
            assert session.steps() == range(steps)
            assert all(same(session, step) for step in (0, steps // 2, steps - 1))
            assert session.series("embed", "rms", 0)[0].tolist() == list(range(steps))
            assert state_of(session) == "recording"
        process.stdin.close()
        process.wait()
    session.refresh()
    assert not session.growing
    assert same(session, 3 * CHUNK_STEPS)
    session.close()
    assert [file.name for file in tmp_path.iterdir()] == ["a.session"]
    assert verify(path) == []


def test_what_was_not_refreshed_is_still_read_after_it_was_chunked(tmp_path: Path) -> None:
    with create(tmp_path / "a.session") as writer:
        for step in range(CHUNK_STEPS - 1):
            writer.step(0, record(step))
        with Session.open(tmp_path / "a.session") as session:
            writer.step(0, record(CHUNK_STEPS - 1))  # packs all of them
            assert session.steps() == range(CHUNK_STEPS - 1)
            assert same(session, 5)
            assert session.series("embed", "rms", 0)[0].tolist() == list(range(CHUNK_STEPS - 1))


def test_refresh_sees_branches_events_and_meta(tmp_path: Path) -> None:
    with create(tmp_path / "a.session", source="old") as writer:
        writer.step(0, record(0))
        with Session.open(tmp_path / "a.session") as session:
            child = writer.branch("b", parent=0, fork_step=1)
            writer.event(child, 1, "note", "x")
            writer.set_meta(source="new")
            assert [branch.id for branch in session.branches()] == [0]
            assert session.refresh()
            assert [branch.id for branch in session.branches()] == [0, child]
            assert session.meta.source == "new"
            assert len(session.events(branch=child)) == 1
            assert not session.refresh()


def test_a_finished_session_that_is_taken_up_again(tmp_path: Path) -> None:
    path = write(tmp_path / "a.session", 3)
    with Session.open(path) as session:
        assert not session.growing
        with SessionWriter.reopen(path) as writer:
            writer.step(0, record(3))
            assert session.refresh()
            assert session.growing
            assert same(session, 3)
        assert same(session, 0)
        with SessionWriter.reopen(path) as writer:
            writer.step(0, record(4))
        assert session.refresh()
        assert same(session, 4)
    assert [file.name for file in tmp_path.iterdir()] == ["a.session"]


def test_an_open_reader_keeps_no_writer_from_finishing(tmp_path: Path) -> None:
    """Whoever closes last leaves one file."""
    path = tmp_path / "a.session"
    writer = create(path)
    writer.step(0, record(0))
    first, second = Session.open(path), Session.open(path)
    writer.close()
    first.close()
    assert same(second, 0)
    second.close()
    assert [file.name for file in tmp_path.iterdir()] == ["a.session"]


def test_many_threads_share_one_session(tmp_path: Path) -> None:
    path = tmp_path / "a.session"
    wrong: list[object] = []
    with create(path) as writer:
        writer.step(0, record(0))
        with Session.open(path) as session:
            done = threading.Event()

            def watch() -> None:
                while not done.is_set():
                    session.refresh()
                    steps = session.steps()
                    try:
                        found = session.series("embed", "rms", 0)[0].tolist()
                        if found[: len(steps)] != list(steps) or not same(session, steps[-1]):
                            wrong.append(steps)
                    except BaseException as error:
                        wrong.append(error)

            threads = [threading.Thread(target=watch) for _ in range(3)]
            for thread in threads:
                thread.start()
            for step in range(1, 2 * CHUNK_STEPS + 10):
                writer.step(0, record(step))
            done.set()
            for thread in threads:
                thread.join()
    assert wrong == []


@pytest.mark.parametrize("mode", [0o400, 0o444])
def test_a_read_only_file_is_read(tmp_path: Path, mode: int) -> None:
    path = write(tmp_path / "a.session", 2)
    path.chmod(mode)
    tmp_path.chmod(0o500)
    try:
        with Session.open(path) as session:
            assert same(session, 1)
        assert verify(path) == []
        assert [file.name for file in tmp_path.iterdir()] == ["a.session"]
    finally:
        tmp_path.chmod(0o700)
