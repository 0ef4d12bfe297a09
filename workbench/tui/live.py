"""The engine behind a live screen: the debugger's host, asked and heard without ever blocking the screen."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from textual.message import Message
from textual.message_pump import MessagePump

from workbench.debugger.core.registry import Command
from workbench.debugger.events import StepEvent
from workbench.debugger.host.client import HostClient
from workbench.debugger.host.messages import CommandAnswer, HostEvent, ReadyEvent
from workbench.debugger.host.pending import HostError

#: The host's program.
HOST_PROGRAM = "workbench.cli.host"
#: How far the engine stands back where it and the screens want the same processor: keys are answered first.
_NICE = 5


class EngineEvent(Message):
    """Something that the host tells unasked."""

    def __init__(self, event: HostEvent) -> None:
        super().__init__()
        self.event = event

    def can_replace(self, message: Message) -> bool:
        """A burst of steps paints once: a newer step takes the place of one that was not handled yet."""
        return (
            isinstance(message, EngineEvent)
            and isinstance(message.event, StepEvent)
            and isinstance(self.event, StepEvent)
        )


class Engine:
    """One host. Events go to `listener`, a screen; it may be changed when another screen takes over."""

    def __init__(self, arguments: Sequence[str]) -> None:
        self.arguments = tuple(arguments)
        self.listener: MessagePump | None = None
        self.running: str | None = None
        self._client: HostClient | None = None

    async def start(self) -> ReadyEvent:
        """Start the host and wait until the model is loaded. HostError says why not."""
        self._client = await asyncio.to_thread(
            HostClient.start, self.arguments, self._heard, program=HOST_PROGRAM
        )
        ready = await asyncio.wrap_future(self._client.ready)
        _stand_back(self._client.process.pid, ready.rank_pids)
        return ready

    def _heard(self, event: HostEvent) -> None:
        """On the client's reading thread: hand over. `post_message` may be called from any thread."""
        listener = self.listener
        if listener is not None and listener.is_running:
            listener.post_message(EngineEvent(event))

    async def command(self, line: str) -> CommandAnswer:
        """Carry out a command line. HostError says what is wrong with it."""
        assert self._client is not None, "the host was not started"
        self.running = line
        try:
            return await asyncio.wrap_future(self._client.command(line))
        finally:
            self.running = None

    async def registry(self) -> list[Command]:
        """Every command there is."""
        assert self._client is not None, "the host was not started"
        return list((await asyncio.wrap_future(self._client.registry())).commands)

    async def weight(self, name: str) -> dict[int, NDArray[np.float32]]:
        """Each rank's share of a parameter. HostError for a name that the ranks do not have."""
        assert self._client is not None, "the host was not started"
        answer = await asyncio.wrap_future(self._client.weight(name))
        return {rank: share.numbers.astype(np.float32) for rank, share in enumerate(answer.tensors)}

    def interrupt(self) -> None:
        """Stop what runs, at an operation boundary."""
        if self._client is not None:
            self._client.interrupt()

    def close(self) -> None:
        """End the host and its ranks in the background; the session is kept."""
        client, self._client, self.listener = self._client, None, None
        if client is not None:
            # Not a daemon: the program does not end before the ranks have.
            threading.Thread(target=_end, args=(client,), name="host-close").start()


def _stand_back(host: int, ranks: Sequence[int]) -> None:
    """Let the host, its ranks and those that it starts later have what the screens leave of the processor.

    The host has a session of its own, and Linux shares the processor out by session first (sched(7), autogroup):
    there the niceness of a process says only how it stands among its own.
    """
    for pid in (host, *ranks):
        with contextlib.suppress(OSError):  # one that has ended meanwhile
            os.setpriority(os.PRIO_PROCESS, pid, _NICE)
    with contextlib.suppress(OSError):  # a kernel that does not group
        Path(f"/proc/{host}/autogroup").write_text(str(_NICE), encoding="ascii")


def _end(client: HostClient) -> None:
    with contextlib.suppress(HostError, OSError):
        client.close()
