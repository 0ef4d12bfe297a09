"""A clock that jumps, by a day either way: what lasts is measured by another clock, and nothing hangs on the hour."""

from __future__ import annotations

import ast
import itertools
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from lockstep.sessions import Session, SessionWriter
from lockstep.sessions.compact import compact
from lockstep.sessions.copy import copy
from lockstep.sessions.lock import holder
from lockstep.sessions.state import state_of
from lockstep.sessions.verify import verify
from tests.sessions.samples import create, record
from tests.sessions.test_crash import ROOT

DAY = 86_400.0

#: The clock of the day. What is left of it: names of files and lines for people, and ages of files.
_DAYS = {"time", "time_ns", "now", "utcnow", "today"}
_ALLOWED = {
    "workbench/error_log.py",
    "workbench/models/chat_template.py",
    "workbench/models/identify.py",
    "workbench/paths.py",
}


def jump(path: Path, seconds: float) -> None:
    """What a write by a clock that is off leaves: the file seems to be of another day."""
    at = time.time() + seconds
    os.utime(path, (at, at))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("order", [(DAY, -DAY), (-DAY, DAY), (-DAY, -2 * DAY)])
def test_a_session_is_read_while_its_clock_jumps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, order: tuple[float, float]
) -> None:
    path, ahead = tmp_path / "a.session", itertools.cycle(order)
    usual = time.time
    monkeypatch.setattr(time, "time", lambda: usual() + next(ahead))
    with create(path) as writer, Session.open(path) as session:
        for step in range(70):  # a chunk is made on the way
            writer.step(0, record(step))
            for file in path.parent.glob("a.session*"):
                jump(file, next(ahead))
            assert session.refresh()
            assert session.steps() == range(step + 1)
            assert holder(path) == f"process {os.getpid()}"
    jump(path, next(ahead))
    with SessionWriter.reopen(path) as writer:
        jump(path, next(ahead))
        writer.step(0, record(70))
    copy(path, tmp_path / "b.session")
    compact(path)
    for one in (path, tmp_path / "b.session"):
        assert verify(one) == []
        with Session.open(one) as session:
            assert state_of(session) == "closed"
            for step in session.steps():
                assert session.stats(step).tobytes() == record(step).stats.tobytes()


def test_a_closed_session_that_is_replaced_by_an_older_one_is_read_anew(tmp_path: Path) -> None:
    path, older = tmp_path / "a.session", tmp_path / "b.session"
    for one, steps in ((path, 2), (older, 1)):
        with create(one) as writer:
            for step in range(steps):
                writer.step(0, record(step))
    jump(older, -DAY)
    with Session.open(path) as session:
        assert session.steps() == range(2)
        older.replace(path)
        assert session.refresh()
        assert session.steps() == range(1)


@pytest.mark.slow
def test_no_duration_is_measured_by_the_clock_of_the_day() -> None:
    found = set()
    for folder in ("engine", "sessions", "workbench"):
        for file in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
                called = node.func if isinstance(node, ast.Call) else None
                if isinstance(called, ast.Attribute) and called.attr in _DAYS:
                    base = ast.unparse(called.value)
                    if base.split(".")[-1] in ("time", "datetime", "date"):
                        found.add(str(file.relative_to(ROOT)))
    assert found <= _ALLOWED, f"{found - _ALLOWED}: time.monotonic() measures what lasts"
    assert "workbench/models/identify.py" in found, "the search finds what there is"


def test_a_lock_is_free_whatever_its_date(tmp_path: Path) -> None:
    """The lock of a writer that was killed, as of tomorrow."""
    path = tmp_path / "a.session"
    code = (
        "import os, signal, sys; from pathlib import Path; from tests.sessions.samples import create, record; "
        "w = create(Path(sys.argv[1])); w.step(0, record(0)); os.kill(os.getpid(), signal.SIGKILL)"
    )
    subprocess.run([sys.executable, "-c", code, str(path)], cwd=ROOT, check=False)
    for file in path.parent.glob("a.session*"):
        jump(file, DAY)
    assert holder(path) == ""
    with SessionWriter.reopen(path) as writer:
        writer.step(0, record(1))
    assert verify(path) == []
