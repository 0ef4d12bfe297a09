"""The one way from a session to the screen: questions asked on a reader thread, immutable answers.

The event loop never reads a file. A question is a pure function of the session (see `snapshots`); its
answer is a frozen snapshot. One thread asks them in order, so an answer is never older than the one before.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from lockstep.engine.errors import panics_as_errors
from lockstep.sessions.session import Session
from lockstep.workbench.settings import session_limits
from lockstep.workbench.views.sentinel_watch import SentinelWatch
from lockstep.workbench.views.source import SessionSource

Answer = TypeVar("Answer")


class Reader:
    """Asks a source questions on a thread of its own. Close it: the source is closed on that thread too."""

    def __init__(self, source: SessionSource) -> None:
        self.source = source
        # Asked by whoever shows sentinels: what one has looked at the other knows.
        self.sentinels = SentinelWatch()
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="session-reader")

    @classmethod
    def open(cls, path: Path, *, follow: bool = True) -> Reader:
        """A reader of the session at `path`; `SessionError` when it is none. `follow`: see `Session.open`."""
        return cls(SessionSource(Session.open(path, session_limits(), follow=follow)))

    async def ask(
        self,
        question: Callable[..., Answer],
        *arguments: object,
    ) -> Answer:
        """`question(source, *arguments)`, answered off the event loop. Cancelling drops it if it has not begun."""
        job = self._thread.submit(self._answer, question, *arguments)
        return await asyncio.wrap_future(job)

    def _answer(self, question: Callable[..., Answer], *arguments: object) -> Answer:
        """On the reader thread; `LimitExceeded` where the answer takes longer than a view may."""
        with panics_as_errors(), self.source.session.view():
            return question(self.source, *arguments)

    def close(self) -> None:
        """Stop asking; what is under way is short and is waited for."""
        self._thread.shutdown(wait=True, cancel_futures=True)
        self.source.close()
