"""The line that shows what is going on: it stays one line, and what is found stays above it."""

from __future__ import annotations

import fcntl
import io
import os
import pty
import struct
import sys
import termios

import pytest

from lockstep.workbench.cli.progress import Status

COLUMNS = 40
CLEAR = "\r\x1b[2K"


def _terminal(monkeypatch: pytest.MonkeyPatch) -> int:
    """The other end of a terminal of forty columns, on which stderr is from now on."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 10, COLUMNS, 0, 0))
    monkeypatch.setattr(sys, "stderr", os.fdopen(theirs, "w"))
    return ours


def _written(terminal: int) -> str:
    """All that was written so far, which a terminal hands on in pieces."""
    found, end = "", "written."
    print(end, end="", file=sys.stderr, flush=True)
    while not found.endswith(end):
        found += os.read(terminal, 4096).decode()
    return found.removesuffix(end)


def test_a_long_line_does_not_wrap_as_it_could_not_be_written_over(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = _terminal(monkeypatch)
    with Status() as status:
        status.report("judging \x1b[2J" + "every tap of every layer " * 10)
        status.count("engine, float32, tp=2", 3, 9)
    _, long, counted, last = _written(terminal).split(CLEAR)
    assert long.startswith("lockstep: judging ?[2Jevery tap")
    assert len(long) == COLUMNS - 1
    assert counted == "lockstep: engine, float32, tp=2: 3 of …"
    assert last == ""


def test_what_is_found_stays_above_the_line(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = _terminal(monkeypatch)
    with Status() as status:
        status.report("naming causes")
        status.found("layers.0.attn.q_proj: q_proj.bias is not added")
        status.report("judging every tap")
    pieces = _written(terminal).split(CLEAR)
    assert pieces[2] == "lockstep: so far: layers.0.attn.q_proj: q_proj.bias is not added\r\n"
    assert pieces[3] == "lockstep: judging every tap…"


def test_where_nobody_waits_nothing_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    written = io.StringIO()
    monkeypatch.setattr(sys, "stderr", written)
    with Status() as status:
        status.report("naming causes")
        status.found("layers.0.attn.q_proj: q_proj.bias is not added")
    assert written.getvalue() == ""
