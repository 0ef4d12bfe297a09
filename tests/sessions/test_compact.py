"""Packing loses nothing but bytes."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from lockstep.sessions import Session, SessionError, SessionWriter, TensorRecord
from lockstep.sessions.compact import Packed, compact
from lockstep.sessions.errors import SessionBusy
from lockstep.sessions.format.schema import CHUNK_STEPS
from lockstep.sessions.state import state_of
from lockstep.sessions.verify import verify
from tests.sessions.samples import create, record, write


def test_a_packed_session_is_smaller_and_the_same(tmp_path: Path) -> None:
    path = write(tmp_path / "a.session", 3 * CHUNK_STEPS)
    noise = np.random.default_rng(0).normal(size=100_000)
    with SessionWriter.reopen(path) as writer:
        writer.tensors(0, 0, [TensorRecord("embed", 0, 0, noise, "float64")])
        writer.tensors(0, 0, [TensorRecord("embed", 0, 0, np.zeros(2), "float64")])  # in its place
    packed = compact(path)
    assert packed.before - packed.after > noise.nbytes * 0.8
    assert packed.after == path.stat().st_size
    assert verify(path) == []
    with Session.open(path) as session:
        assert all(session.stats(s).tobytes() == record(s).stats.tobytes() for s in session.steps())
        assert session.tensor("embed", step=0, rank=0).tolist() == [0.0, 0.0]
        assert session.tensor("embed", step=1, rank=0)[0, 0] == 1
    with SessionWriter.reopen(path) as writer:
        writer.step(0, record(3 * CHUNK_STEPS))
    assert [file.name for file in tmp_path.iterdir()] == ["a.session"]


def test_packing_never_enlarges(tmp_path: Path) -> None:
    """A packed short one that has grown: with the large pages that long ones read fastest with it would be larger."""
    path = write(tmp_path / "a.session", 2)
    compact(path)
    with SessionWriter.reopen(path) as writer:
        for step in range(2, CHUNK_STEPS + 6):
            writer.step(0, record(step))
    size, file = path.stat().st_size, path.stat().st_ino
    for _ in range(2):
        assert compact(path) == Packed(size, size, converted=False)
        assert (path.stat().st_size, path.stat().st_ino) == (size, file)
    assert verify(path) == []
    with Session.open(path) as session:
        assert session.steps() == range(CHUNK_STEPS + 6)
        assert state_of(session) == "closed"


def test_what_is_no_session_is_not_compacted(tmp_path: Path) -> None:
    (tmp_path / "a.session").write_bytes(b"hello")
    with pytest.raises(SessionError):
        compact(tmp_path / "a.session")
    assert (tmp_path / "a.session").read_bytes() == b"hello"


def test_a_session_being_written_is_left_alone(tmp_path: Path) -> None:
    with create(tmp_path / "a.session") as writer:
        writer.step(0, record(0))
        with pytest.raises(SessionBusy, match="is being recorded by process"):
            compact(tmp_path / "a.session")
        writer.step(0, record(1))
    assert verify(tmp_path / "a.session") == []


def test_a_pack_that_is_killed_leaves_a_whole_session(tmp_path: Path) -> None:
    """Killed between the making of the compact one and its taking the other's place."""
    path = write(tmp_path / "a.session", 5)
    code = """
import os, signal, sys
from pathlib import Path
from lockstep.sessions import compact
def killed(fresh, path):
    os.kill(os.getpid(), signal.SIGKILL)
compact.put_in_place = killed
compact.compact(Path(sys.argv[1]))
"""
    done = subprocess.run([sys.executable, "-c", code, str(path)], cwd=Path(__file__).parents[2], check=False)
    assert done.returncode == -signal.SIGKILL
    assert verify(path) == []
    compact(path)
    assert verify(path) == []
    assert [file.name for file in tmp_path.iterdir()] == ["a.session"]
