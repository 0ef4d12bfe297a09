"""The debugger's host behind a live workbench, asked and heard without ever blocking the event loop."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import TypeVar

import numpy as np
from msgspec import structs
from textual.message import Message
from textual.message_pump import MessagePump

from lockstep.sessions.text import clean
from lockstep.workbench.debugger.core.registry import Command
from lockstep.workbench.debugger.events import ProgressEvent, RankLostEvent, StepEvent
from lockstep.workbench.debugger.host.client import HostClient
from lockstep.workbench.debugger.host.messages import ClosedEvent, DebuggerState, HostEvent, OutputEvent
from lockstep.workbench.debugger.host.pending import HostError
from lockstep.workbench.tui.drivers.port import (
    CLOSING,
    CommandFailed,
    CommandStage,
    Progressed,
    Reply,
    Reported,
)
from lockstep.workbench.tui.widgets.status_line import Fact
from lockstep.workbench.views.weight_tensor import RankArrays
from lockstep.workbench.views.where import Where

#: The host's program.
_PROGRAM = "lockstep.workbench.cli.host"
#: The niceness of the engine's processes: where they and the screens want the same processor, keys are answered first.
_NICE = 5

A = TypeVar("A")


class LiveDriver:
    """One host and its ranks; see `port.Driver`."""

    live = True

    def __init__(self, arguments: Sequence[str]) -> None:
        self.arguments = tuple(arguments)
        self.listener: MessagePump | None = None
        self.running: str | None = None
        self.opening: Sequence[str] = ()
        self.at: DebuggerState | None = None
        self.warning = ""  # what the host printed last while it was starting
        self.host_pid = 0
        self.rank_pids: Sequence[int] = ()
        self._stages: list[tuple[float, ProgressEvent]] = []  # when each began, and its last report
        self._started: HostClient | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    async def start(self) -> Path:
        """Start the host and wait until the model is loaded; returns the session's path. CommandFailed: why not."""
        self._loop = asyncio.get_running_loop()
        self._started = client = await asyncio.to_thread(
            HostClient.start, self.arguments, self._heard, program=_PROGRAM
        )
        ready = await _answer(client.ready)
        self.host_pid, self.rank_pids, self.at = ready.pid, ready.rank_pids, ready.state
        self.opening = ("next",) if ready.state.step < 0 else ()
        _lower_priority(client.process.pid, self.rank_pids)
        return Path(ready.session)

    @property
    def _client(self) -> HostClient:
        assert self._started is not None, "the host was not started"
        return self._started

    @property
    def lost(self) -> str:
        """Why the ranks are gone; "" while they run."""
        return (self.at.lost or "") if self.at is not None else ""

    @property
    def unresponsive(self) -> str:
        """The host may have been stopped."""
        return self._started.unresponsive if self._started is not None else ""

    @property
    def why_idle(self) -> str:
        """The ranks, or the host, may be gone."""
        ended = self.at is not None and not self.at.live
        return self.lost or ("the engine has ended" if ended else "")

    @property
    def why_no_toggle(self) -> str:
        """A rank may be lost."""
        return "a rank was lost: :restart first" if self.lost else ""

    @property
    def stages(self) -> Sequence[CommandStage]:
        """What was reported of the command that runs."""
        ends = [*(began for began, _ in self._stages[1:]), time.monotonic()]
        return [
            CommandStage(clean(reported.what, limit=80), reported.done, reported.of, end - began)
            for (began, reported), end in zip(self._stages, ends, strict=False)
        ]

    def state(self, where: Where, busy: bool) -> Fact:
        """What the engine does."""
        at = self.at
        if self.unresponsive:
            return Fact("● host does not answer", "wrong")
        if self.lost:
            return Fact("● rank lost", "wrong")
        if at is not None and not at.live:
            return Fact("○ engine ended", "wrong")
        if self.running is not None and busy:
            return Fact(f"● {self.running.split()[0]} …", "accent")
        if at is None:
            return Fact("● stopped", "text")
        if at.step < 0:
            return Fact("● before step 0", "text")
        inside = f" at {at.tap}" if at.tap else ""
        if (at.branch, at.step) != (where.branch, where.step):
            on = f", branch {at.branch}" if at.branch != where.branch else ""
            return Fact(f"looking · stopped in step {at.step}{inside}{on} (= returns)", "accent")
        return Fact(f"●{inside}" if inside else "● stopped", "text")

    async def commands(self) -> Sequence[Command]:
        """The host's registry."""
        return (await _answer(self._client.registry())).commands

    async def run(self, line: str, where: Where) -> Reply:
        """Carry out a command line, of the sequence that the screen shows, wherever it looks."""
        self.running = line
        try:
            answer = await _answer(self._client.command(line, where.seq))
        finally:
            self.running = None
            self._stages.clear()
        self.at = answer.state
        return Reply.of(answer.text, answer.result)

    async def shares(self, name: str) -> RankArrays:
        """Each rank's share of a parameter."""
        if self.running is not None or self.why_idle:
            return {}
        answer = await _answer(self._client.weight(name))
        return {rank: share.numbers.astype(np.float32) for rank, share in enumerate(answer.tensors)}

    def interrupt(self) -> None:
        """Stop what runs, at an operation boundary."""
        if self._started is not None:
            self._started.interrupt()

    def close(self) -> None:
        """End the host and its ranks in the background; the session is kept."""
        client, self._started, self.listener = self._started, None, None
        if client is not None:
            # Not a daemon: the program does not end before the ranks have.
            threading.Thread(target=_end, args=(client,), name=CLOSING).start()

    # --- events --------------------------------------------------------------------------------------

    def _heard(self, event: HostEvent) -> None:
        """An event, on the client's reading thread: handed to the event loop."""
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # the program has ended, and its event loop with it
                self._loop.call_soon_threadsafe(self._take, event)

    def _take(self, event: HostEvent) -> None:
        if self.at is None:  # not started: how that ends, `ready` reports
            if isinstance(event, OutputEvent):
                self.warning = clean(event.text, newlines=True, limit=2000)
            return
        match event:
            case StepEvent(branch=branch, step=step):
                if self.running is not None:  # else the answer is here already, and knows better
                    self.at = structs.replace(self.at, branch=branch, step=step)
                    self._post(Progressed())
            case ProgressEvent(what=what):
                if self._stages and self._stages[-1][1].what == what:
                    self._stages[-1] = (self._stages[-1][0], event)
                elif self.running is not None:
                    self._stages.append((time.monotonic(), event))
            case OutputEvent(text=text):
                self._post(Reported(clean(text, newlines=True), wrong=False))
            case RankLostEvent(message=message):
                self.at = structs.replace(self.at, lost=message or "a rank was lost")
                reported = (
                    f"{clean(message, newlines=True)}   the session is kept; :restart starts the ranks again"
                )
                self._post(Reported(reported, wrong=True))
            case ClosedEvent(message=message):
                self.at = structs.replace(self.at, live=False)
                reported = clean(message or "the engine has ended", newlines=True)
                self._post(
                    Reported(f"{reported}; the session is kept and can still be looked at", wrong=True)
                )

    def _post(self, message: Message) -> None:
        if self.listener is not None and self.listener.is_running:
            self.listener.post_message(message)


def _lower_priority(host: int, ranks: Sequence[int]) -> None:
    """Let the host, its ranks and those that it starts later have what the screens leave of the processor.

    The host has a session of its own, and Linux shares the processor out by session first (sched(7), autogroup):
    there the niceness of a process shows only how it stands among its own.
    """
    for pid in (host, *ranks):
        with contextlib.suppress(OSError):  # one that has ended meanwhile
            os.setpriority(os.PRIO_PROCESS, pid, _NICE)
    with contextlib.suppress(OSError):  # a kernel that does not group
        Path(f"/proc/{host}/autogroup").write_text(str(_NICE), encoding="ascii")


def _end(client: HostClient) -> None:
    with contextlib.suppress(HostError, OSError):
        client.close()


async def _answer(answer: Future[A]) -> A:
    """Wait for the host's answer. CommandFailed where it is an error."""
    try:
        return await asyncio.wrap_future(answer)
    except HostError as error:
        raise CommandFailed(str(error)) from error
