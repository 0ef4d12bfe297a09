"""A program of ours in a process of its own, asked over a socket (torch-free)."""

from __future__ import annotations

import socket
import subprocess
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass

from lockstep.engine.children import start_python
from lockstep.engine.lifeline import Lifeline


@dataclass(frozen=True, slots=True)
class AnsweringProcess:
    """`python -m program SOCKET LIFELINE …`: two descriptors that it inherits, of the other end of `socket` and of a
    pipe by which it ends with this process. It prints nothing."""

    process: subprocess.Popen[bytes]
    socket: socket.socket
    lifeline: Lifeline

    @classmethod
    def start(cls, program: str, *words: str, settings: Mapping[str, str] | None = None) -> AnsweringProcess:
        """Start it, with `settings` in its environment; OSError where no process can be started."""
        with ExitStack() as stack:
            ours, theirs = socket.socketpair()
            stack.callback(ours.close)
            lifeline = Lifeline()
            stack.callback(lifeline.close)
            with theirs:
                try:
                    process = start_python(
                        "-m", program, str(theirs.fileno()), str(lifeline.fd), *words,
                        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                        pass_fds=[theirs.fileno(), lifeline.fd], settings=settings,
                    )  # fmt: skip
                finally:
                    lifeline.handed_over()
            stack.pop_all()  # they are the caller's now
        return cls(process, ours, lifeline)

    def end(self) -> None:
        """End it, whatever it is doing."""
        self.socket.close()
        self.lifeline.close()
        self.process.kill()
        self.process.wait()
