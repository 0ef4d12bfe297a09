"""What a recording may take of the memory and the disk, whatever an engine taps; and one thread at a time."""

from __future__ import annotations

import contextlib
import functools
import math
import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch

#: Of one rank: bytes in its files (LOCKSTEP_TAP_BYTES), names of taps, bytes of a line: what is read again.
MOST_BYTES, MOST_TAPS, LONGEST_LINE = 64 << 30, 100_000, 64 << 20
#: Characters of a name and of a layout.
LONGEST_NAME, LONGEST_LAYOUT = 500, 100

Method = TypeVar("Method", bound=Callable[..., None])


def alone(method: Method) -> Method:
    """One thread at a time: a call of another meanwhile waits for nobody, and stops the tape. None of code that is
    compiled."""

    @functools.wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> None:
        if torch.compiler.is_compiling():
            return
        limits: TapeLimits = self.limits
        if limits.busy.acquire(blocking=False):
            try:
                method(self, *args, **kwargs)
            finally:
                limits.busy.release()
        else:
            limits.crossed = True

    return call  # type: ignore[return-value]


def refuse_capture() -> None:
    """RuntimeError while a CUDA graph is captured: to read a tensor would end the capture, and with it the engine."""
    if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
        raise RuntimeError("a CUDA graph is being captured: run the engine eager")


class TapeLimits:
    """What one of `ranks` may take, whatever is tapped. Beyond it is an error, which stops the tape."""

    def __init__(self, folder: Path, ranks: int) -> None:
        self.folder, self.ranks, self.written = folder, ranks, 0
        self.names: set[str] = set()
        self.busy, self.crossed = threading.RLock(), False
        self.most = int(os.environ.get("LOCKSTEP_TAP_BYTES") or MOST_BYTES)

    def begin(self) -> None:
        self.held, self.taps, self.memory = 0, 0, free_memory() / 2 / self.ranks

    def take(self, name: str, layout: str, size: int, whole: bool) -> None:
        """A tensor for the pass at hand; of what is not kept `whole` little stays."""
        if self.crossed:
            raise RuntimeError("two threads tap at a time, so that nobody knows what is of which pass")
        self.names.add(name)
        self.taps += 1
        if max(self.taps, len(self.names)) > MOST_TAPS:
            raise ValueError(f"more than {MOST_TAPS} taps: choose them (only)")
        if len(name) > LONGEST_NAME or len(layout) > LONGEST_LAYOUT:
            raise ValueError(f"a name has at most {LONGEST_NAME} characters, a layout {LONGEST_LAYOUT}")
        if self.held + size > self.memory:
            raise MemoryError(
                f"this pass holds {(self.held + size) >> 20} MiB: choose taps (only), or statistics"
            )
        self.held += size if whole else 0
        self._check_files(self.written + self.held)

    def write(self, size: int, line: int) -> None:
        """A pass. The session that is made of the dump takes about as much room again."""
        self.written += max(size, 4096)
        self._check_files(self.written)
        if line > LONGEST_LINE:
            raise ValueError(f"the line of this pass has {line >> 20} MiB: choose taps (only)")
        if shutil.disk_usage(self.folder).free - size < self.written * self.ranks:
            raise OSError(
                f"no room on the disk for this pass and a session of {self.written >> 20} MiB a rank"
            )

    def _check_files(self, size: int) -> None:
        if size > self.most:
            raise OSError(
                f"{size >> 20} MiB would be written, {self.most >> 20} MiB may be (LOCKSTEP_TAP_BYTES)"
            )


def free_memory() -> float:
    """Bytes, as far as the system reports them."""
    with contextlib.suppress(OSError, ValueError), open("/proc/meminfo", encoding="ascii") as file:
        return next(int(line.split()[1]) << 10 for line in file if line.startswith("MemAvailable"))
    return math.inf
