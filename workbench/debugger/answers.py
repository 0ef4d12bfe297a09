"""What commands answer: typed values, each with a text for people and JSON for programs. Nothing prints.

Stops speak the Debug Adapter Protocol's words (reason, threadId, hitBreakpointIds, description): a rank is a
thread, and all of them are always stopped together.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from lockstep.sessions.text import clean
from lockstep.workbench.words import numbers

#: What programs are given: free in its form, a kind at a time.
JsonObject = dict[str, Any]

#: Numbers shown of a tensor before it is cut to its edges.
_SHOWN = 1000


@dataclass(frozen=True, slots=True)
class Position:
    """Where the debugger stands: a branch, a step (-1: nothing was run), and the tap inside the step that
    has just passed (None: the step is complete)."""

    branch: int
    step: int
    place: int | None = None


@dataclass(frozen=True)
class Result:
    """The answer to a command."""

    kind: ClassVar[str] = "result"

    def to_text(self) -> str:
        """For a terminal; free of control sequences, whatever a session holds."""
        return clean(self._text(), newlines=True)

    def _text(self) -> str:
        raise NotImplementedError

    def to_json(self) -> JsonObject:
        """For programs: `kind` and the value's own fields."""
        return {"kind": self.kind, **jsonable(asdict(self))}


@dataclass(frozen=True)
class Message(Result):
    """Something reported."""

    text: str
    data: Mapping[str, Any] = field(default_factory=dict)
    kind: ClassVar[str] = "message"

    def _text(self) -> str:
        return self.text


@dataclass(frozen=True)
class TableResult(Result):
    """Rows under headings. A line break in a cell, which may be a stranger's, makes no line."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Any]]
    empty: str = "nothing"
    kind: ClassVar[str] = "table"

    def _text(self) -> str:
        if not self.rows:
            return f"{self.title}: {self.empty}" if self.title else self.empty
        cells = [list(self.columns), *([clean(cell(value)) for value in row] for row in self.rows)]
        widths = [max(len(row[i]) for row in cells) for i in range(len(self.columns))]
        lines = [
            "  ".join(text.ljust(w) for text, w in zip(row, widths, strict=True)).rstrip() for row in cells
        ]
        return "\n".join([*([self.title] if self.title else []), *lines])


@dataclass(frozen=True)
class Stop(Result):
    """All ranks stand still. `tap` is the operation that has just passed, "" between steps."""

    reason: str  # DAP: step, breakpoint, data breakpoint, exception, pause, goto, entry; ours: divergence, end, toggle
    description: str
    branch: int
    step: int
    tap: str = ""
    position: int | None = None
    token: str | None = None
    thread_id: int = 0
    hit_breakpoint_ids: Sequence[int] = ()
    output: Sequence[Result] = ()  # displays, and what a breakpoint's commands printed
    kind: ClassVar[str] = "stopped"

    def _text(self) -> str:
        where = "before step 0" if self.step < 0 else f"step {self.step}"
        if self.tap:
            where += f", at {self.tap}"
        elif self.token is not None:
            where += f" → {self.token}"
        branch = f", branch {self.branch}" if self.branch else ""
        if self.reason == "toggle":
            head = self.description  # states where as well
        elif self.reason in ("step", "goto"):
            head = f"{where}{branch}"
        else:
            head = f"{self.description}: {where}{branch}"
        return "\n".join([clean(head), *(one.to_text() for one in self.output)])

    def to_json(self) -> JsonObject:
        return {
            "kind": self.kind, "reason": self.reason, "description": self.description,
            "threadId": self.thread_id, "allThreadsStopped": True,
            "hitBreakpointIds": list(self.hit_breakpoint_ids), "branch": self.branch, "step": self.step,
            "tap": self.tap or None, "position": self.position, "token": self.token,
            "output": [one.to_json() for one in self.output],
        }  # fmt: skip


@dataclass(frozen=True)
class Group(Result):
    """Several answers to one command."""

    parts: Sequence[Result]
    kind: ClassVar[str] = "group"

    def _text(self) -> str:
        return "\n".join(part.to_text() for part in self.parts)

    def to_json(self) -> JsonObject:
        return {"kind": self.kind, "parts": [part.to_json() for part in self.parts]}


@dataclass(frozen=True)
class TensorValue(Result):
    """A tensor, or the part that was asked for. `rank` None: rebuilt from all ranks by its layout."""

    tap: str
    step: int
    rank: int | None
    index: str
    array: NDArray[Any]
    source: str  # "session" | "live" | "re-executed"
    note: str = ""
    kind: ClassVar[str] = "tensor"

    def _text(self) -> str:
        who = "" if self.rank is None else f" rank {self.rank}"
        shape = "×".join(map(str, self.array.shape)) or "scalar"
        tap = clean(self.tap)
        head = f"{tap}{self.index}{who}, step {self.step}: {shape} {self.array.dtype}"
        if self.array.ndim == 0:
            head = f"{tap}{self.index}{who}, step {self.step} = {numbers.scalar(float(self.array))}"
        else:
            with np.printoptions(nanstr=numbers.number(math.nan), infstr=numbers.number(math.inf)):
                shown = np.array2string(
                    self.array, threshold=_SHOWN, edgeitems=3, max_line_width=100, precision=6
                )
            head += f"\n{shown}"
        return f"{head}\n{self.note}" if self.note else head

    def to_json(self) -> JsonObject:
        flat = self.array.reshape(-1)
        return {
            "kind": self.kind, "tap": self.tap, "step": self.step, "rank": self.rank, "index": self.index,
            "shape": list(self.array.shape), "dtype": str(self.array.dtype), "source": self.source,
            "note": self.note, "data": jsonable(flat[:_SHOWN].tolist()), "truncated": flat.size > _SHOWN,
        }  # fmt: skip


@dataclass(frozen=True)
class Expectation(Result):
    """What `expect` found. `detail` are the values that the claim was judged by."""

    claim: str
    holds: bool
    detail: str = ""
    kind: ClassVar[str] = "expect"

    def _text(self) -> str:
        return f"{'ok' if self.holds else 'FAILED'}: expect {self.claim}" + (
            f"  ({self.detail})" if self.detail else ""
        )


@dataclass(frozen=True)
class Failure(Result):
    """An error, as the answer to a command."""

    error: str  # the exception's class
    message: str
    exit_code: int = 2
    kind: ClassVar[str] = "error"

    def _text(self) -> str:
        return self.message


def cell(value: Any) -> str:
    """One value of a table."""
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return numbers.cell(value)
    return str(value)


def jsonable(value: Any) -> Any:
    """Plain JSON values: numpy unwrapped; NaN and infinities, which JSON lacks, as strings."""
    if isinstance(value, Mapping):
        return {str(key): jsonable(item) for key, item in value.items()}
    if isinstance(value, np.ndarray):
        return jsonable(value.tolist())
    if isinstance(value, list | tuple | range | set | frozenset):
        return [jsonable(item) for item in value]
    if isinstance(value, np.generic):
        return jsonable(value.item())
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value
