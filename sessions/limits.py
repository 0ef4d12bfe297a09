"""What reading one session may cost: memory for everything that is decoded, processor time for a view of it.

A small file can ask for much: 32 kB of zstd make a tensor of 1 GiB, 20 MB of JSON half a gigabyte of objects. So every
opened session has a `ReadMeter`. Whoever decodes asks it for room before anything is allocated, and has what was
decoded counted for as long as it lives. Time is that of the thread's processor: a busy machine makes no session bad.
"""

from __future__ import annotations

import math
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from lockstep.sessions.errors import SessionError

_MIB = 1 << 20
#: Seconds that reading a whole file may take for each of its bytes, beside those of a view.
_SECONDS_PER_BYTE = 1 / _MIB
#: About what a row takes as a record, without its lists, texts and JSON.
RECORD_BYTES = 500
#: What a tensor's reader makes of it meanwhile: the bytes as decoded, widened, and one result.
_COPIES = 3

_ADVICE = "If you trust the file, raise `{}` in config.toml."

T = TypeVar("T")
#: Of this thread's view: the `seconds` that it has, the processor time of its `deadline`, the `budget` that it is of.
_thread = threading.local()


@dataclass(frozen=True, slots=True)
class ReadLimits:
    """`memory`: bytes of everything decoded from one session that is in use at once. `seconds`: of processor time for
    one view (what a pane shows, what `lockstep sessions show` prints)."""

    memory: int = 512 * _MIB
    seconds: float = 10.0


DEFAULT = ReadLimits()
#: For sessions that the program has just recorded itself.
UNLIMITED = ReadLimits(sys.maxsize, math.inf)


class LimitExceeded(SessionError):
    """A session asks for more memory or time than reading it may cost."""


class BoundedCache(Protocol):
    """Decoded values that are kept only because they may be asked for again."""

    def forget(self) -> None:
        """Let go of them: the room is needed."""


class Charged(list[T]):
    """A list whose contents count `nbytes` while it lives; a plain list has no weak references."""

    __slots__ = ("__weakref__", "nbytes")
    nbytes: int


@dataclass(slots=True)
class _Budget:
    """Processor time that all views of a thread have together, and what is left of it."""

    seconds: float
    left: float


class ReadMeter:
    """What one opened session has in use. Safe to use from several threads."""

    def __init__(self, name: str, limits: ReadLimits) -> None:
        self.name, self.limits = name, limits
        self._counting = limits.memory < UNLIMITED.memory
        self._used = 0
        self._lock = threading.Lock()
        self._arrays: set[int] = set()  # ids of the arrays that count
        #: (bytes, id) of what is gone: a finalizer may run inside any statement, so it only makes a note.
        self._freed: deque[tuple[int, int]] = deque()
        self._caches: weakref.WeakSet[Any] = weakref.WeakSet()

    # --- memory --------------------------------------------------------------------------------------

    @property
    def used(self) -> int:
        """Bytes of what was decoded and is still alive; 0 where memory is not limited."""
        with self._lock:
            while self._freed:
                nbytes, identity = self._freed.popleft()
                self._used -= nbytes
                self._arrays.discard(identity)
            return self._used

    def room(self, nbytes: int, what: str) -> None:
        """`LimitExceeded` unless `nbytes` more may be allocated, if need be after caches were emptied. Call it before
        decoding `what`."""
        self.check_time()
        if not self._counting or self.used + nbytes <= self.limits.memory:
            return
        for cache in list(self._caches):
            cache.forget()
        if (used := self.used) + nbytes > self.limits.memory:
            raise LimitExceeded(
                f"{self.name}: no room for {what}: about {_size(nbytes)}"
                f"{f', beside {_size(used)} in use' if used >= _MIB else ''}; reading a session may take "
                f"{_size(self.limits.memory)} of memory. {_ADVICE.format('session_memory')}"
            )

    def keep(self, owner: object, nbytes: int) -> None:
        """Count `nbytes` for as long as `owner` lives."""
        if not self._counting:
            return
        with self._lock:
            self._used += nbytes
        weakref.finalize(owner, self._freed.append, (nbytes, id(owner))).atexit = False

    def keep_array(self, array: NDArray[Any], nbytes: int | None = None) -> NDArray[Any]:
        """Count an array (as `tensor_bytes` by default) for as long as it, or a view of it, lives; once."""
        if not self._counting:
            return array
        owner = array
        while isinstance(owner.base, np.ndarray):
            owner = owner.base
        # A tensor without dimensions is read as a number. `used` first: it forgets the ids of what is gone.
        if isinstance(owner, np.ndarray) and self.used >= 0 and id(owner) not in self._arrays:
            self._arrays.add(id(owner))
            self.keep(owner, tensor_bytes(array.size, array.itemsize) if nbytes is None else nbytes)
        return array

    def charged(self, values: Iterable[T], nbytes: int) -> Charged[T]:
        """The values as a list, which count `nbytes` while it lives. Ask for room before."""
        found = Charged(values)
        found.nbytes = nbytes
        self.keep(found, nbytes)
        return found

    def register(self, cache: BoundedCache) -> None:
        """Have `cache` emptied where there is no room otherwise."""
        self._caches.add(cache)

    # --- time ----------------------------------------------------------------------------------------

    @contextmanager
    def view(self, file_bytes: int = 0) -> Iterator[None]:
        """What is read inside by this thread has the time of one view; inside another view that one's time goes on.

        What reads a whole file gives `file_bytes`, its length, and has a second more for each MiB of it.
        """
        if expires() < math.inf or self.limits.seconds == math.inf:  # the processor time is dear to ask for
            yield
            return
        budget: _Budget | None = getattr(_thread, "budget", None)
        seconds = self._seconds(file_bytes)
        _thread.seconds, left = (seconds, seconds) if budget is None else (budget.seconds, budget.left)
        begun = time.thread_time()
        _thread.deadline = begun + left
        try:
            yield
        finally:
            _thread.deadline = math.inf
            if budget is not None:
                budget.left -= time.thread_time() - begun

    @contextmanager
    def reading(self, file_bytes: int) -> Iterator[None]:
        """Inside, all that this thread reads has together the time of a view of a file of that length, and nothing else
        that it does counts: for what computes long on what it reads, and ends by a limit of its own."""
        before = expires(), getattr(_thread, "budget", None)
        begun, seconds = time.thread_time(), self._seconds(file_bytes)
        _thread.deadline, _thread.budget = math.inf, _Budget(seconds, seconds)
        try:
            yield
        finally:
            _thread.deadline, _thread.budget = before[0] + time.thread_time() - begun, before[1]

    def _seconds(self, file_bytes: int) -> float:
        return self.limits.seconds + file_bytes * _SECONDS_PER_BYTE

    def check_time(self) -> None:
        """`LimitExceeded` if the time of this thread's view is over."""
        if expired():
            raise LimitExceeded(
                f"{self.name}: stopped, as reading this takes more than {_thread.seconds:.3g} s of processor time. "
                f"{_ADVICE.format('session_seconds')}"
            )


def expires() -> float:
    """The processor time at which this thread's view ends; infinite outside of one."""
    deadline: float = getattr(_thread, "deadline", math.inf)
    return deadline


def expired() -> bool:
    """Whether the time of this thread's view is over."""
    deadline = expires()
    return deadline < math.inf and time.thread_time() > deadline


def tensor_bytes(elements: int, itemsize: int) -> int:
    """What a tensor counts: as float32 or wider, with the copies that its reader makes."""
    return _COPIES * elements * max(4, itemsize)


def _size(nbytes: int) -> str:
    return f"{nbytes / _MIB:,.0f} MiB" if nbytes >= _MIB else f"{nbytes:,} bytes"
