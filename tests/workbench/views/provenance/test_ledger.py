"""The ledger of a paged cache: engines that do right are never accused, and what is put into their tables is named."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from lockstep.sessions.meta import CacheMeta
from lockstep.workbench.views.provenance.accesses import CachedRow, CachePass, CacheRead, passes_of, tables
from lockstep.workbench.views.provenance.ledger import Misuse, SlotLedger, WrongAccess
from tests.workbench.views.provenance.paged import PagedEngine, with_reads, with_rows

SIZE = 4


def engine(change: object = None) -> PagedEngine:
    made = PagedEngine(SIZE, list(range(1, 40)))
    if change is not None:
        made.change = change  # type: ignore[assignment]
    return made


def followed(passes: list[CachePass], window: int | None = None) -> SlotLedger:
    ledger = SlotLedger([CacheMeta(block_size=SIZE, window=window)])
    for one in passes:
        ledger.follow(one)
    return ledger


def wrong(passes: list[CachePass]) -> list[WrongAccess]:
    return followed(passes).wrong


def decode(made: PagedEngine, number: int, count: int) -> None:
    for _ in range(count):
        made.requests[number].tokens.append(7 + len(made.requests[number].tokens) % 5)
        made.run({number: 1})


@pytest.mark.parametrize("seed", range(30))
def test_no_run_of_an_engine_that_does_right_is_accused(seed: int) -> None:
    """Chunks, shared prefixes, preemption, blocks given on and few of them: every row is its request's own."""
    dice = random.Random(seed)
    size = dice.choice([1, 2, 4])
    made = PagedEngine(size, list(range(1, 1 + 240 // size)))
    number = 0
    for _ in range(60):
        act = dice.random()
        running = list(made.requests)
        if act < 0.3 and len(running) < 4:
            made.begin(number, [dice.randrange(2) for _ in range(dice.randrange(2, 12))])
            number += 1
        elif act < 0.4 and running:
            made.end(dice.choice(running))
        elif act < 0.5 and running:
            made.preempt(dice.choice(running))
        else:
            counts = {}
            for one in dice.sample(running, len(running)):
                reported = made.requests[one]
                if reported.computed == len(reported.tokens):
                    reported.tokens.append(dice.randrange(2))
                counts[one] = dice.randint(1, len(reported.tokens) - reported.computed)
            made.run(counts)
    ledger = SlotLedger([CacheMeta(block_size=made.size)])
    for one in made.passes:
        ledger.follow(one)
    assert not ledger.wrong


@pytest.mark.parametrize("seed", range(30))
def test_any_other_block_in_a_table_is_found(seed: int) -> None:
    """Whatever block with another content is put into the table of a request, its reads are wrong from there on."""
    dice = random.Random(seed)
    made = engine()
    for number in range(3):
        made.begin(number, [100 * number + place for place in range(dice.randrange(5, 13))])
        made.run({number: len(made.requests[number].tokens)})
    reader = dice.randrange(3)
    at = dice.randrange(len(made.requests[reader].blocks))
    other = dice.choice(
        [one for number in range(3) if number != reader for one in made.requests[number].blocks]
    )
    made.requests[reader].blocks[at] = other
    decode(made, reader, 1)
    found = wrong(made.passes)
    assert {one.request for one in found} == {reader}
    assert any(one.places[0] // SIZE == at for one in found)


def test_another_requests_block() -> None:
    made = engine()
    made.begin(1, list(range(10, 15)))
    made.begin(2, list(range(20, 25)))
    made.run({1: 5, 2: 5})
    made.requests[2].blocks[0] = made.requests[1].blocks[0]
    decode(made, 2, 1)
    (one,) = wrong(made.passes)
    assert (one.kind, one.request, one.places, one.block) == (
        Misuse.FOREIGN,
        2,
        (0, 3),
        made.requests[1].blocks[0],
    )
    assert one.owner is not None
    assert (one.owner.request, one.owner.number) == (1, 0)


def test_rows_that_are_written_one_slot_too_far() -> None:
    """As real engines did: in decode the length counts the token at hand. At a block's end, too."""

    def shifted(one: CachePass) -> CachePass:
        if len(one.rows) > 1:
            return one
        return with_rows(one, lambda row: replace(row, slots=(row.slots[0] + 1,)))

    made = engine(shifted)
    made.begin(0, list(range(7)))
    made.run({0: 7})
    decode(made, 0, 2)
    found = wrong(made.passes)
    assert {one.kind for one in found} == {Misuse.MISPLACED}
    first = found[0]
    assert first.own is not None
    assert first.own.slot - first.own.expected == 1
    assert (first.places, first.owner) == ((7, 7), None)


def test_a_row_that_went_elsewhere_is_missed_by_who_shares_it() -> None:
    made = engine(
        lambda one: with_rows(
            one, lambda row: replace(row, slots=(row.slots[0] + 1,)) if row.place == SIZE - 1 else row
        )
    )
    made.begin(1, list(range(10, 15)))
    made.run({1: 5})
    made.end(1)
    made.begin(2, list(range(10, 15)))
    made.run({2: 1})
    found = wrong(made.passes)
    assert [(one.kind, one.request, one.places) for one in found] == [
        (Misuse.MISPLACED, 1, (3, 3)),
        (Misuse.MISPLACED, 2, (3, 3)),
    ]
    assert found[0].own == found[1].own


def test_two_prefixes_with_one_hash() -> None:
    made = engine()
    made.begin(1, list(range(10, 19)))
    made.run({1: 9})
    made.end(1)
    made.begin(2, [*range(10, 14), 50, *range(15, 19)])
    taken = made.requests[2]
    taken.blocks.append(2)  # of tokens 14 to 17
    taken.computed = 8
    made.free.remove(2)
    made.run({2: 1})
    (one,) = wrong(made.passes)
    assert (one.kind, one.places, one.given, one.right) == (Misuse.COLLISION, (4, 7), 14, 50)


def test_a_block_that_was_given_on_and_is_still_found() -> None:
    made = PagedEngine(SIZE, [1, 2])
    prompt = list(range(10, 15))
    made.begin(1, prompt)
    made.run({1: 5})
    made.end(1)
    made.free = [1, 2]
    made.begin(2, list(range(30, 33)))
    made.run({2: 3})
    made.begin(3, prompt)
    made.requests[3].blocks, made.requests[3].computed = [1], 4
    made.run({3: 1})
    kinds = {one.kind for one in wrong(made.passes)}
    assert kinds == {Misuse.EVICTED}


def test_a_shared_block_that_is_free_while_one_still_reads_it() -> None:
    """It was right when it was taken from the prefix cache, which is not to blame: a user of it was not counted."""
    made = PagedEngine(SIZE, [1, 2, 3])
    prompt = list(range(10, 15))
    made.begin(1, prompt)
    made.run({1: 5})
    made.begin(2, prompt)
    made.run({2: 1})
    made.end(1)
    made.free = [1]
    made.begin(3, list(range(30, 33)))
    made.run({3: 3})
    made.requests[2].tokens.append(50)
    made.run({2: 1})
    (one,) = wrong(made.passes)
    assert (one.kind, one.request, one.block, one.places) == (Misuse.OVERWRITTEN, 2, 1, (0, 2))


def test_a_live_block_that_is_given_to_another() -> None:
    made = engine()
    made.begin(1, list(range(10, 14)))
    made.run({1: 4})
    made.free.insert(0, made.requests[1].blocks[0])
    made.begin(2, list(range(20, 23)))
    made.run({2: 3})
    decode(made, 1, 1)
    (one,) = wrong(made.passes)
    assert (one.kind, one.request, one.places) == (Misuse.OVERWRITTEN, 1, (0, 2))


def test_padding_that_is_written_over_a_row() -> None:
    made = engine()
    made.begin(1, list(range(10, 14)))
    made.run({1: 4})
    padding = CachedRow(-1, 0, 0, 0, (made.requests[1].blocks[0] * SIZE + 2,))
    made.change = lambda one: replace(one, rows=(*one.rows, padding))
    decode(made, 1, 1)
    (one,) = wrong(made.passes)
    assert (one.kind, one.places) == (Misuse.PADDING, (2, 2))


def test_positions_that_begin_again_behind_a_hit() -> None:
    made = engine()
    made.begin(1, list(range(10, 18)))
    made.run({1: 8})
    made.change = lambda one: with_rows(one, lambda row: replace(row, position=row.place - 4))
    made.begin(2, list(range(10, 16)))
    made.run({2: 2})
    found = wrong(made.passes)
    assert [(one.kind, one.given, one.right) for one in found] == [
        (Misuse.POSITION, 0, 4),
        (Misuse.POSITION, 1, 5),
    ]


@pytest.mark.parametrize("by", [1, -1])
def test_a_length_that_is_not_the_requests(by: int) -> None:
    made = engine(lambda one: with_reads(one, lambda read: replace(read, length=read.length + by)))
    made.begin(1, list(range(5)))
    made.run({1: 5})
    (one,) = wrong(made.passes)
    assert (one.kind, one.given, one.right) == (Misuse.LENGTH, 5 + by, 5)


def test_a_row_that_is_not_written() -> None:
    made = engine(
        lambda one: with_rows(one, lambda row: replace(row, slots=(-1,)) if row.place == 2 else row)
    )
    made.begin(1, list(range(5)))
    made.run({1: 5})
    (one,) = wrong(made.passes)
    assert (one.kind, one.places) == (Misuse.MISPLACED, (2, 2))


def test_a_token_that_is_left_out_between_two_chunks() -> None:
    """What lies in its slot is of the request that had the block before."""
    made = PagedEngine(SIZE, [1, 2], share=False)
    made.begin(0, [3] * 8)
    made.run({0: 8})
    made.end(0)
    made.begin(1, list(range(8)))
    made.run({1: 5})
    made.requests[1].computed += 1
    made.run({1: 2})
    (one,) = wrong(made.passes)
    assert (one.kind, one.places, one.owner and one.owner.request) == (Misuse.STALE, (5, 5), 0)


def test_a_rejected_draft_that_is_written_over_is_no_fault() -> None:
    made = engine()
    made.begin(1, [1, 2, 3, 4, 5])
    made.run({1: 5})
    made.requests[1].tokens[3:] = [9]
    made.requests[1].computed = 3
    made.run({1: 1})
    assert not wrong(made.passes)


def test_a_rejected_draft_that_is_still_read() -> None:
    """The token is taken back, but no row is computed for the one in its place."""
    made = engine()
    made.begin(1, [1, 2, 3, 4])
    made.run({1: 4})
    made.change = lambda one: replace(one, cached={1: (1, 2, 9, 4)})
    decode(made, 1, 1)
    found = wrong(made.passes)
    assert {one.kind for one in found} == {Misuse.REJECTED}
    assert found[0].places == (2, 3)


def test_rows_outside_the_window_are_not_read() -> None:
    made = engine()
    made.begin(1, list(range(8)))
    made.run({1: 8})
    made.requests[1].blocks[0] = 39  # given back
    decode(made, 1, 1)
    assert wrong(made.passes)
    assert not followed(made.passes, window=4).wrong


def test_tables_hold_all_that_the_passes_report() -> None:
    made = engine()
    made.begin(1, list(range(10, 18)))
    made.run({1: 8})
    made.begin(2, list(range(10, 16)))
    made.run({2: 2})
    assert list(passes_of(*tables(made.passes))) == made.passes


def test_tables_of_strangers_are_refused() -> None:
    rows, reads = tables([])
    with pytest.raises(ValueError, match="no passes"):
        list(passes_of(rows[:, :3], reads))
    ledger = SlotLedger([CacheMeta(block_size=1 << 16)])
    reads_of = CacheRead(0, 0, 1, (0,))
    rows_of = [CachedRow(0, 1, place, place, (place << 16,)) for place in range(400)]
    with pytest.raises(ValueError, match="more than is looked at"):
        ledger.follow(CachePass(0, tuple(rows_of), ((reads_of,),), {}))
