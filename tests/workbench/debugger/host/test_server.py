"""The host's side of the protocol alone: a replay served over a socket pair."""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec.msgpack import Decoder, encode

from lockstep.engine.ranks.wire import Connection
from lockstep.engine.scratch import ScratchFolder
from lockstep.workbench.debugger.core import registry
from lockstep.workbench.debugger.core.debugger import Debugger
from lockstep.workbench.debugger.host.messages import (
    AnswerFrame,
    CloseRequest,
    CommandAnswer,
    DoneAnswer,
    ErrorAnswer,
    HostFrame,
    InterruptRequest,
    LineRequest,
    Request,
    RequestFrame,
)
from lockstep.workbench.debugger.host.replay import open_replay
from lockstep.workbench.debugger.host.server import Host
from tests.workbench.debugger.host.test_replay import RECORDED


class Served:
    """A host on a thread, and the other end of its connection."""

    def __init__(self, scratch: Path, debugger: Debugger) -> None:
        self.socket, theirs = socket.socketpair()
        self.socket.settimeout(30)
        self.connection = Connection(self.socket, Decoder(HostFrame))
        self.host = Host(Connection(theirs, Decoder(RequestFrame)), ScratchFolder.make("host", scratch))
        self.host.debugger = debugger
        self.threads = [
            threading.Thread(target=self.host.listen, daemon=True),
            threading.Thread(target=self.host.serve, args=(debugger,), daemon=True),
        ]
        for thread in self.threads:
            thread.start()

    def ask(self, request: Request, number: int = 7) -> object:
        """The answer to a request; events on the way are passed over."""
        self.connection.send(RequestFrame(number, request))
        while True:
            frame = self.connection.receive()
            if isinstance(frame, AnswerFrame):
                assert frame.id == number
                return frame.answer

    def ends(self) -> bool:
        """Whether both threads come to their end."""
        for thread in self.threads:
            thread.join(10)
        return not any(thread.is_alive() for thread in self.threads)


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    with open_replay(RECORDED / "load_bias-false.session") as debugger:
        yield Served(tmp_path, debugger)


def fail(debugger: Debugger) -> None:
    raise ZeroDivisionError("by chance")


def test_a_defect_in_a_command_does_not_end_the_host(
    served: Served, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """A defect is reported; neither the host nor its ranks end."""
    monkeypatch.setitem(registry._FUNCTIONS, "branches", fail)
    answer = served.ask(LineRequest("branches"))
    assert isinstance(answer, ErrorAnswer)
    assert (answer.error.kind, answer.error.exit_code) == ("InternalError", 70)
    assert "ZeroDivisionError: by chance" in answer.error.message
    assert "raise ZeroDivisionError" in capfd.readouterr().err
    answer = served.ask(LineRequest("next"))
    assert isinstance(answer, CommandAnswer)
    assert answer.state.step == 0


def test_an_idle_interrupt_is_answered_and_forgotten(served: Served) -> None:
    assert isinstance(served.ask(InterruptRequest()), DoneAnswer)
    answer = served.ask(LineRequest("next"))
    assert isinstance(answer, CommandAnswer)
    assert answer.result["reason"] == "step"


@pytest.mark.parametrize(
    "frame",
    [
        b"\xc1",
        encode({"id": 1}),
        encode({"id": 1, "request": {"type": "dance"}}),
        encode({"id": 1, "request": {"type": "command", "line": 5}}),
        encode(["command"]),
    ],
    ids=str,
)
def test_a_frame_that_does_not_validate_ends_the_connection_in_order(served: Served, frame: bytes) -> None:
    served.socket.sendall(struct.pack("<I", len(frame)) + frame)
    assert served.ends()


def test_closing_is_answered(served: Served) -> None:
    assert isinstance(served.ask(CloseRequest()), DoneAnswer)
