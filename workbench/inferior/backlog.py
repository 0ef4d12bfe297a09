"""What could not be written to the session, in order, until it can be: a full disk costs tensors, not the run."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from lockstep.sessions import SessionWriter
from lockstep.sessions.records import StepRecord

Write = Callable[[SessionWriter], object]
Key = tuple[int, int]  # branch, step

#: Newest steps that keep their statistics and checksums. Of the older ones stays what was read and emitted: without it
#: the session could not go on, nor the debugger back.
KEPT_STEPS = 256

_WHY = "the session could not be written at the time"


@dataclass(slots=True)
class Backlog:
    """Writes that wait. Counted over the whole recording: `cut`, steps whose tensors were dropped, and `bare`, whose
    statistics were."""

    cut: int = 0
    bare: int = 0
    _writes: deque[Key | Write] = field(default_factory=deque)
    _steps: dict[Key, StepRecord] = field(default_factory=dict)
    _full: dict[Key, None] = field(default_factory=dict)  # the steps that have their statistics, oldest first
    _late: list[Key] = field(default_factory=list)  # steps that have been written after all

    def __bool__(self) -> bool:
        return bool(self._writes)

    def __len__(self) -> int:
        return len(self._steps)

    def step(self, branch: int, step: int) -> StepRecord | None:
        """A step that waits."""
        return self._steps.get((branch, step))

    def add(self, write: Write) -> None:
        """Keep something that is no step; once only, where it is the very same."""
        if write not in self._writes:
            self._writes.append(write)

    def add_step(self, branch: int, record: StepRecord) -> None:
        """Keep a step without its tensors; beyond the bound the oldest loses its statistics."""
        key = branch, record.step
        self._steps[key], self._full[key] = record, None
        self._writes.append(key)
        if record.tensors:
            self.cut += 1
            words = f"{len(record.tensors)} tensors: {_WHY}"
            self._steps[key] = replace(record, tensors=(), dropped=(*record.dropped, words))
        if len(self._full) > KEPT_STEPS:
            oldest = next(iter(self._full))
            del self._full[oldest]
            self.bare += 1
            kept = self._steps[oldest]
            words = f"statistics and checksums: {_WHY}"
            self._steps[oldest] = replace(kept, stats=None, checksums=None, dropped=(*kept.dropped, words))

    def flush(self, writer: SessionWriter) -> None:
        """Write all that waits, in order. `SessionWriteError` where that cannot go on: the rest waits still."""
        while self._writes:
            first = self._writes[0]
            if callable(first):
                first(writer)
            else:
                writer.step(first[0], self._steps[first])
                del self._steps[first]
                self._full.pop(first, None)
                self._late.append(first)
            self._writes.popleft()

    def take_late(self) -> str:
        """ "12 steps (3 to 14) were", of what was written late since this was last asked; "" for nothing."""
        late, self._late = self._late, []
        return _extent(late) if late else ""

    @property
    def extent(self) -> str:
        """ "12 steps (3 to 14) were", of what waits."""
        return _extent(list(self._steps)) if self._steps else "the last events were"

    @property
    def losses(self) -> str:
        """What is lost for good; "" for nothing."""
        counts = ((self.cut, "the tensors"), (self.bare, "the statistics"))
        return " and ".join(f"{what} of {count} step{'s' * (count > 1)}" for count, what in counts if count)


def _extent(keys: Sequence[Key]) -> str:
    first, last = keys[0][1], keys[-1][1]
    return f"step {first} was" if len(keys) == 1 else f"{len(keys)} steps ({first} to {last}) were"
