"""Bugs of caches and states, each put into an engine of `paged` that is right without it. Those that strike once do so
where it shows: behind a hit, at a request that is preempted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

# The engine's own module, which runs as a program; here are only its numbers.
SIZE = 4


def foreign_block(engine: Any) -> None:
    """The last block of a hit is the one that was found before it."""
    found = engine.found

    def exchanged(one: Any) -> list[tuple[int, ...]]:
        blocks: list[tuple[int, ...]] = found(one)
        return [*blocks[:-1], blocks[-2]] if len(blocks) > 1 else blocks

    engine.found = exchanged


def stale_after_eviction(engine: Any) -> None:
    """A block that is given to another request can still be found by what it held."""
    for group in engine.groups:
        group.pool.forget = lambda block: None


def parent_left_out(engine: Any) -> None:
    """A block is found by its own tokens alone, whatever comes before them."""
    for group in engine.groups:
        group.pool.key = lambda parent, tokens: hash(tuple(tokens))


def last_row_of_block_one_too_far(engine: Any) -> None:
    """The last row of each block is written to the first slot of the next; it is read where it should be."""
    slot, laid_out = engine.slot, engine.laid_out
    engine.read_slot = lambda group, one, table, place: slot(table, place)

    def moved(batch: Any) -> Any:
        engine.slot = lambda table, place: slot(table, place) + (place % SIZE == SIZE - 1)
        batch = laid_out(batch)
        engine.slot = slot
        most = engine.settings.blocks * SIZE
        batch.slots = [[at if at < most else -1 for at in slots] for slots in batch.slots]
        return batch

    engine.laid_out = moved


def positions_from_zero(engine: Any) -> None:
    """Behind a hit the first pass of a request has positions from 0 on."""
    engine.positions = lambda one, count: [
        place - (one.cached if one.computed == one.cached else 0) for place in engine.places(one, count)
    ]


def positions_one_behind(engine: Any) -> None:
    """Behind a hit all positions are one too small."""
    engine.positions = lambda one, count: [place - bool(one.cached) for place in engine.places(one, count)]


def rejected_rows_left(engine: Any) -> None:
    """The rows of drafts that were refused are not taken back."""

    def counted(one: Any, right: int, count: int) -> None:
        one.computed = right
        one.left_behind = max(0, getattr(one, "stop_of_rows", 0) - right)

    accept, laid_out = engine.accept, engine.laid_out

    def seen(one: Any, count: int, chosen: list[int]) -> None:
        one.stop_of_rows = one.computed + count
        accept(one, count, chosen)

    def longer(batch: Any) -> Any:
        batch = laid_out(batch)
        batch.lengths = [
            min(length + max(0, getattr(one, "left_behind", 0) - (count - 1)), SIZE * len(one.tables[0]))
            for length, (one, count) in zip(batch.lengths, batch.plan, strict=True)
        ]
        return batch

    engine.counted, engine.accept, engine.laid_out = counted, seen, longer


def padding_is_written(engine: Any) -> None:
    """The rows that fill up a pass go to the slots of the last row before them, one behind the other."""
    engine.padding = lambda slots, more: [slots[-1]] * more


def last_token_read_twice(engine: Any) -> None:
    """A prompt that is cached as a whole is taken as a whole: its last token is read again, behind itself."""
    begin = engine.begin

    def whole(one: Any) -> None:
        reusable = engine.reusable
        engine.reusable = lambda one: len(one.tokens)
        begin(one)
        engine.reusable = reusable
        if one.computed == len(one.tokens):
            one.tokens.append(one.tokens[-1])

    engine.begin = whole


def chunk_sees_one_too_many(engine: Any) -> None:
    """Each row of a later chunk sees the row behind it."""
    engine.mask_offset = lambda one: 1 if one.computed and one.computed < len(one.tokens) - 1 else 0


def chunk_begins_one_late(engine: Any) -> None:
    """A prompt's second chunk leaves out its first token."""
    accept = engine.accept

    def skipping(one: Any, count: int, chosen: list[int]) -> None:
        before = one.computed
        accept(one, count, chosen)
        if before == one.cached and one.computed < len(one.tokens) - 2:
            one.computed += 1

    engine.accept = skipping


def resumed_with_old_table(engine: Any) -> None:
    """A request that was preempted goes on with the blocks that it had, as if they were still its own; there is one
    fewer of all, so that another takes them."""
    for group in engine.groups:
        group.pool.free.pop()
    preempt, begin = engine.preempt, engine.begin

    def noted(one: Any) -> None:
        one.old = [list(table) for table in one.tables], one.computed
        preempt(one)

    def resumed(one: Any) -> None:
        begin(one)
        if old := getattr(one, "old", None):
            tables, computed = old
            for group, table, mine in zip(engine.groups, tables, one.tables, strict=True):
                for block in table[len(mine) :]:
                    group.pool.share(block) if block in group.pool.free or group.pool.users[block] else None
                mine[:] = table
            one.computed = min(computed, len(one.tokens) - 1)

    engine.preempt, engine.begin = noted, resumed


def state_not_restored(engine: Any) -> None:
    """Behind a hit the states of linear attention begin empty."""
    engine.begin_state = lambda one: setattr(one, "state", engine.empty_state())


def state_not_reset(engine: Any) -> None:
    """A request begins with the states that the one before it left."""
    left: list[Any] = []
    end, begin_state = engine.end, engine.begin_state

    def ended(one: Any) -> None:
        left[:] = [one.state] if one.state is not None and one.computed else left
        end(one)

    def begun(one: Any) -> None:
        begin_state(one)
        if left and not one.computed:
            one.state = left[0]

    engine.end, engine.begin_state = ended, begun


def unfilled_block_is_shared(engine: Any) -> None:
    """Two requests that begin alike share the block in which they part, and both write to it."""
    has_blocks, found = engine.has_blocks, engine.found

    def shared(one: Any) -> list[tuple[int, ...]]:
        blocks: list[tuple[int, ...]] = found(one)
        one.parts_in = [
            group.pool.known.get(("open", tuple(one.tokens[len(blocks) * SIZE :][:2])), 0)
            for group in engine.groups
        ]
        return blocks

    def filled(one: Any, count: int) -> bool:
        for group, table, block in zip(engine.groups, one.tables, getattr(one, "parts_in", ()), strict=False):
            if block and len(table) * SIZE == one.computed and group.pool.users[block]:
                group.pool.share(block)
                table.append(block)
        one.parts_in = ()
        answer: bool = has_blocks(one, count)
        for group, table in zip(engine.groups, one.tables, strict=True):
            at = one.computed // SIZE
            if answer and at < len(table):
                group.pool.known["open", tuple(one.tokens[at * SIZE :][:2])] = table[at]
        return answer

    engine.found, engine.has_blocks = shared, filled


def window_table_one_short(engine: Any) -> None:
    """Behind a hit the block table of the windowed layers lacks its first block."""
    laid_out = engine.laid_out

    def short(batch: Any) -> Any:
        batch = laid_out(batch)
        for number, group in enumerate(engine.groups):
            if group.window is not None:
                batch.tables[number] = [
                    [*table[1:], table[-1]] if one.cached else table
                    for (one, _), table in zip(batch.plan, batch.tables[number], strict=True)
                ]
        return batch

    engine.laid_out = short


def tables_in_another_order(engine: Any) -> None:
    """Attention has the block tables of the first two requests of a batch in another order than its rows."""
    laid_out = engine.laid_out

    def turned(batch: Any) -> Any:
        batch = laid_out(batch)
        for tables in batch.tables:
            if len(tables) > 1:
                first, second = tables[:2]
                tables[:2] = [*second, *first[len(second) :]], [*first, *second[len(first) :]]
        return batch

    engine.laid_out = turned


def logits_in_another_order(engine: Any) -> None:
    """The rows whose logits are computed are those of the batch in another order."""

    def gathered(hidden: Tensor, rows: list[int]) -> Tensor:
        return hidden[[*rows[1:], *rows[:1]]]

    engine.gathered = gathered


def freed_twice(engine: Any) -> None:
    """The first block of a request that ends is free twice, and given to two."""
    end = engine.end

    def ended(one: Any) -> None:
        blocks = [table[0] for table in one.tables if table]
        end(one)
        for group, block in zip(engine.groups, blocks, strict=False):
            if block in group.pool.free:
                group.pool.free.insert(1, block)

    def share(pool: Any) -> Callable[[int], None]:
        def shared(block: int) -> None:
            if block in pool.free:
                pool.free.remove(block)
            pool.users[block] += 1

        return shared

    engine.end = ended
    for group in engine.groups:
        group.pool.share = share(group.pool)


PLANTS: dict[str, Callable[[Any], None]] = {
    one.__name__: one
    for one in (
        foreign_block, stale_after_eviction, parent_left_out, last_row_of_block_one_too_far, positions_from_zero,
        positions_one_behind, rejected_rows_left, padding_is_written, last_token_read_twice, chunk_sees_one_too_many,
        chunk_begins_one_late, resumed_with_old_table, state_not_restored, state_not_reset, unfilled_block_is_shared,
        window_table_one_short, tables_in_another_order, logits_in_another_order, freed_twice,
    )
}  # fmt: skip
