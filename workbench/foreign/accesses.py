"""What a dump reports on an engine's paged cache in one pass: where its rows go, and which are read."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

from lockstep.sessions.meta import CacheMeta, Count, Size
from lockstep.sessions.records import MAX_LAYERS

Slot = Annotated[int, Meta(ge=-1, lt=2**53)]
Token = Annotated[int, Meta(ge=0, lt=2**31)]


class CacheRequest(Struct, kw_only=True):
    """A request of a pass: it has `rows` there. `computed` of its tokens had a row before by the scheduler's count;
    `cached` are the tokens before its first row, where it begins with rows of the cache."""

    request: Annotated[str, Meta(max_length=1000)]
    rows: Count
    computed: Count
    cached: list[Token] = []


class CacheGroup(Struct, kw_only=True):
    """Of the layers that share a block table: the slot of each row, and of each request how many rows attention reads
    and the blocks that hold them. `padding` are the slots of rows that are no request's."""

    layers: list[Annotated[int, Meta(ge=0, lt=MAX_LAYERS)]] = []
    block_size: Annotated[int, Meta(ge=1, le=1 << 16)]
    window: Size | None = None
    slots: list[Slot]
    padding: list[Slot] = []
    lengths: list[Count]
    blocks: list[list[Slot]]

    @property
    def meta(self) -> CacheMeta:
        return CacheMeta(layers=tuple(self.layers), block_size=self.block_size, window=self.window)


class CacheAccesses(Struct, kw_only=True):
    """What a pass does to the cache: its requests in the order of its rows, and each group of layers."""

    requests: list[CacheRequest]
    groups: list[CacheGroup]

    def places(self, rows: int) -> tuple[int, ...]:
        """Of each row of a pass of so many how many tokens its request has before it, by the scheduler's count; 0 of
        padding."""
        found = [one.computed + row for one in self.requests for row in range(one.rows)]
        return (*found, *[0] * (rows - len(found)))

    def contradiction(self, rows: int) -> str:
        """What does not fit a pass of so many rows; "" where all does."""
        count = sum(one.rows for one in self.requests)
        if count > rows:
            return f"has {count} rows of {rows}"
        for group in self.groups:
            if len(group.slots) != count or len(group.padding) > rows - count:
                return f"has {len(group.slots)} and {len(group.padding)} slots for {count} rows of {rows}"
            if not len(group.lengths) == len(group.blocks) == len(self.requests):
                return f"has {len(group.blocks)} block tables for {len(self.requests)} requests"
        return ""
