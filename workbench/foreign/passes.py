"""What a reader of a foreign dump gives, whatever its format: passes of ranks, each with the tensors that were seen.

    reader (one a format) → ForeignRun → rows by (request, position) → ranks merged → session

Names and layouts are a reader's matter as far as its format knows them; which rows are whose, what is padding, and a
layout that nobody gives are settled afterwards, in one place for all formats.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from lockstep.engine.config.engine import MOST_RANKS
from lockstep.engine.text import printable
from lockstep.sessions.meta import ModelMeta
from lockstep.workbench.foreign.accesses import CacheAccesses

#: What is reported while a run is imported: how many passes of how many.
Counted = Callable[[int, int], None]
#: The text of a token; None where that is not known.
TokenText = Callable[[int], str | None]


class ForeignDumpError(Exception):
    """A dump that cannot be imported; the message states what, where, and what to do."""


@dataclass(frozen=True, slots=True)
class ForeignTensor:
    """One tensor that one rank saw in one pass.

    `tap` is our name where there is a counterpart, else the engine's own (a generic tap). `layout` as in `Tap`; "" is
    not given. `array` holds the numbers exactly (bfloat16 as uint16, with `dtype` "bfloat16"), its first axis one row a
    token; `rows` are those tokens as indices into the pass, None: all, or (of fewer) the last of each request.
    A dump of statistics alone has no array: `statistics` are [rows, STATISTICS] or, of the whole tensor, [1,
    STATISTICS], and `hashes` [rows] uint64 are equal for bit-equal rows of the same engine.
    """

    tap: str
    layout: str
    dtype: str
    array: NDArray[Any] | None = None
    rows: tuple[int, ...] | None = None
    statistics: NDArray[np.float32] | None = None
    hashes: NDArray[np.uint64] | None = None


@dataclass(frozen=True, slots=True)
class ForeignPass:
    """One forward pass on one rank: the token `ids` that went in, flattened over all requests, at `positions`.

    `requests` name the request of each row, "" for padding; None where the dump does not name them. `places` count the
    tokens before each row in its request, where they are reported beside the positions that the model was given.
    Tensors are in the order in which they were seen; the same tap may come more than once. `cache`: where the rows lie,
    where that is reported. `greedy`: the requests whose next token is the likeliest by the logits of this pass, where
    that is reported.
    """

    rank: int
    index: int
    ids: tuple[int, ...]
    positions: tuple[int, ...]
    requests: tuple[str, ...] | None
    tensors: Sequence[ForeignTensor]
    cache: CacheAccesses | None = None
    places: tuple[int, ...] | None = None
    greedy: frozenset[str] | None = None


@dataclass(frozen=True, slots=True)
class ForeignFacts:
    """What a dump reports on the run as a whole: `source` is the engine and its version, `mode` how it ran ("eager",
    "compiled", "" where that is not reported), `ranks` how many there should be, those without a file included."""

    source: str
    ranks: int
    mode: str = ""
    model: ModelMeta = field(default_factory=ModelMeta)
    dtype: str = ""
    device: str = ""
    versions: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


class ForeignRun(Protocol):
    """A dump that has been opened. Reading is lazy: a pass at a time."""

    @property
    def folder(self) -> Path: ...

    @property
    def facts(self) -> ForeignFacts: ...

    def passes(self, rank: int) -> Iterator[ForeignPass]:
        """The passes of one rank in order; none where it wrote nothing. ForeignDumpError for what cannot be read."""
        ...


def checked_ranks(count: int, stated_by: str) -> int:
    """ForeignDumpError for none, and for more ranks than are read."""
    if not 1 <= count <= MOST_RANKS:
        raise ForeignDumpError(f"{printable(stated_by)} states {count} ranks; 1 to {MOST_RANKS} are read")
    return count
