"""A paged engine as small as can be, for the ledger of its cache: it hands out blocks, shares prefixes and takes back
what it needs. What goes wrong is put in by the test, into the tables that it reports."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from lockstep.workbench.views.provenance.accesses import CachedRow, CachePass, CacheRead

Change = Callable[[CachePass], CachePass]


@dataclass
class PagedRequest:
    tokens: list[int]
    blocks: list[int] = field(default_factory=list)
    computed: int = 0
    reported: bool = False


@dataclass
class PagedEngine:
    """`size` rows a block, `free` blocks to give. Blocks that are full are found again by their tokens, until they are
    given to another, if it is to `share` them. Without `change` every pass is as it should be."""

    size: int
    free: list[int]
    change: Change = lambda one: one
    share: bool = True
    requests: dict[int, PagedRequest] = field(default_factory=dict)
    passes: list[CachePass] = field(default_factory=list)
    _known: dict[tuple[int, ...], int] = field(default_factory=dict)

    def begin(self, number: int, tokens: list[int]) -> None:
        """A request, with the blocks of its prefix that are known: at most all but the last token."""
        one = PagedRequest(list(tokens))
        while (
            self.share
            and (stop := one.computed + self.size) < len(tokens)
            and tuple(tokens[:stop]) in self._known
        ):
            one.blocks.append(self._known[tuple(tokens[:stop])])
            one.computed = stop
        self.free = [block for block in self.free if block not in one.blocks]
        self.requests[number] = one

    def end(self, number: int) -> None:
        """Its blocks can be given to others, those that were given first last; what they hold stays known till then."""
        mine = reversed(self.requests.pop(number).blocks)
        used = {block for one in self.requests.values() for block in one.blocks}
        self.free += [block for block in mine if block not in used and block not in self.free]

    def preempt(self, number: int) -> None:
        """Its blocks are free; it begins again, with what is still known of its prefix."""
        before = self.requests[number]
        self.end(number)
        self.begin(number, before.tokens)
        self.requests[number].reported = before.reported

    def run(self, counts: dict[int, int]) -> CachePass:
        """A pass with so many rows of each request."""
        rows, reads, cached = list[CachedRow](), list[CacheRead](), dict[int, tuple[int, ...]]()
        for number, count in counts.items():
            one = self.requests[number]
            if not one.reported and one.computed:
                cached[number] = tuple(one.tokens[: one.computed])
            one.reported = True
            length = one.computed + count
            while len(one.blocks) * self.size < length:
                one.blocks.append(self._give())
            for place in range(one.computed, length):
                slot = one.blocks[place // self.size] * self.size + place % self.size
                rows.append(CachedRow(number, one.tokens[place], place, place, (slot,)))
            reads.append(CacheRead(number, one.computed, length, tuple(one.blocks)))
            one.computed = length
            for full in range(length // self.size):
                self._known.setdefault(tuple(one.tokens[: (full + 1) * self.size]), one.blocks[full])
        made = self.change(CachePass(len(self.passes), tuple(rows), (tuple(reads),), cached))
        self.passes.append(made)
        return made

    def _give(self) -> int:
        block = self.free.pop(0)
        self._known = {tokens: known for tokens, known in self._known.items() if known != block}
        return block


def with_rows(one: CachePass, change: Callable[[CachedRow], CachedRow]) -> CachePass:
    return replace(one, rows=tuple(map(change, one.rows)))


def with_reads(one: CachePass, change: Callable[[CacheRead], CacheRead]) -> CachePass:
    return replace(one, reads=(tuple(map(change, one.reads[0])),))


def as_recorded(one: CachePass, size: int) -> dict[str, Any]:
    """A pass as an attached engine reports it to its tape."""
    names = [read.request for read in one.reads[0]]
    counts = [sum(row.request == name for row in one.rows) for name in names]
    requests = [
        {
            "request": f"request {read.request}",
            "rows": count,
            "computed": read.computed,
            "cached": list(one.cached.get(read.request, ())),
        }
        for read, count in zip(one.reads[0], counts, strict=True)
    ]
    group = {
        "layers": [0, 1],
        "block_size": size,
        "window": None,
        "slots": [row.slots[0] for row in one.rows if row.request >= 0],
        "padding": [row.slots[0] for row in one.rows if row.request < 0],
        "lengths": [read.length for read in one.reads[0]],
        "blocks": [list(read.blocks) for read in one.reads[0]],
    }
    return {"requests": requests, "groups": [group]}
