"""Tensors and steps that are read again and again are decoded once."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager

from lockstep.sessions.session import Session

#: Bytes of decoded tensors that are kept of a session.
KEPT_BYTES = 512 << 20


@contextmanager
def keeping(*sessions: Session | None, nbytes: int = KEPT_BYTES) -> Iterator[None]:
    """Inside, each tensor and step of these sessions is decoded once, as long as `nbytes` suffice for all of a session;
    beyond that those used last are kept. The arrays are read-only then, and what is written meanwhile may not be seen:
    this is for who reads finished sessions."""
    with ExitStack() as stack:
        for one in sessions:
            if one is not None:
                stack.enter_context(one._kept.keeping(nbytes))
        yield


def reading(session: Session) -> AbstractContextManager[None]:
    """As `Session.walk`, where only what this thread spends on reading counts: for what computes on all of it."""
    return session.meter.reading(session._archive.file_bytes())
