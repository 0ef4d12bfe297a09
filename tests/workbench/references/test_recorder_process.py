"""Listening to a recorder whose pipe is closed while it is read, as where a signal interrupts whoever waits for it."""

from __future__ import annotations

import io
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from lockstep.workbench.references.recorder_process import RecorderListener


def test_a_pipe_that_is_closed_while_it_is_read_ends_the_listening(monkeypatch: pytest.MonkeyPatch) -> None:
    failed: list[BaseException | None] = []
    monkeypatch.setattr(threading, "excepthook", lambda reported: failed.append(reported.exc_value))
    lines = io.BytesIO(b"a library's warning\n" * 3)
    process: Any = SimpleNamespace(stderr=lines)
    listener = RecorderListener(process, None)
    listener.rest = _Closing(lines)  # type: ignore[assignment]
    listener.start()
    listener.join()
    assert lines.closed
    assert failed == []


class _Closing(list[str]):
    """Closes the lines once one of them is kept."""

    def __init__(self, lines: io.BytesIO) -> None:
        self.lines = lines

    def append(self, line: str) -> None:
        self.lines.close()
