"""Requests that a dump does not name: found from positions, order and logits, or refused."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.workbench.foreign.heads import PassHead
from lockstep.workbench.foreign.passes import ForeignDumpError
from lockstep.workbench.foreign.rows import PADDING, PROFILING, REJECTED, REPEATED, UNFINISHED, planned

#: A row: sequence and position; None is padding.
At = tuple[int, int] | None


def token(seq: int, position: int) -> int:
    """What sequence `seq` reads there."""
    return (31 * seq + 7 * position + position * position) % 97 + 3


def head(rows: list[At], *, tops: bool = True, greedy: bool = True, blank: bool = False) -> PassHead:
    """A pass of these rows whose requests are not named. `tops`: the logits of each request's last row were seen."""
    ids = tuple(0 if at is None else token(*at) for at in rows)
    positions = tuple(0 if at is None else at[1] for at in rows)
    last = {at[0]: at[1] for at in rows if at is not None}
    chosen = (
        tuple(token(seq, position + 1) if greedy else 1 for seq, position in last.items()) if tops else ()
    )
    return PassHead(ids, positions, None, chosen, None, blank)


def chunk(seq: int, start: int, stop: int) -> list[At]:
    return [(seq, position) for position in range(start, stop)]


def sequences(heads: list[PassHead]) -> list[tuple[int, ...]]:
    return [one.ids for one in planned(heads).sequences]


def ids(seq: int, count: int) -> tuple[int, ...]:
    return tuple(token(seq, position) for position in range(count))


@pytest.mark.parametrize("tops", [True, False])
def test_a_batch_that_decodes_in_step(tops: bool) -> None:
    passes = [chunk(0, 0, 4) + chunk(1, 0, 3) + chunk(2, 0, 6)]
    passes += [[(0, 4 + k), (1, 3 + k), (2, 6 + k)] for k in range(3)]
    assert sequences([head(one, tops=tops) for one in passes]) == [ids(0, 7), ids(1, 6), ids(2, 9)]


NEIGHBOURS: list[list[At]] = [chunk(0, 0, 4) + chunk(1, 0, 5), [(0, 4), (1, 5)], [(0, 5), (1, 6)]]


@pytest.mark.parametrize("greedy", [True, False])
def test_neighbouring_positions_of_two_requests_are_no_chunk(greedy: bool) -> None:
    """A row at 4 and one at 5 with two rows of logits: two sequences of 4 and 5 rows, not one of 4 that reads two."""
    assert sequences([head(one, greedy=greedy) for one in NEIGHBOURS]) == [ids(0, 6), ids(1, 7)]


def test_without_logits_neighbouring_positions_after_a_prefill_cannot_be_settled() -> None:
    with pytest.raises(ForeignDumpError, match="request of each row"):
        sequences([head(one, tops=False) for one in NEIGHBOURS])
    decoding: list[list[At]] = [chunk(0, 0, 4), [(0, 4)], chunk(1, 0, 7), [(0, 5), (1, 7)], [(0, 6), (1, 8)]]
    assert sequences([head(one, tops=False) for one in decoding]) == [ids(0, 7), ids(1, 9)]


def test_equal_lengths_are_distinguished_by_what_logits_chose() -> None:
    """The second pass has the two in another order."""
    passes = [chunk(0, 0, 4) + chunk(1, 0, 4), [(1, 4), (0, 4)], [(0, 5), (1, 5)]]
    assert sequences([head(one) for one in passes]) == [ids(0, 6), ids(1, 6)]


def test_without_logits_the_order_counts_as_long_as_each_gets_a_row() -> None:
    both = [chunk(0, 0, 4) + chunk(1, 0, 4), [(0, 4), (1, 4)]]
    assert sequences([head(one, tops=False) for one in both]) == [ids(0, 5), ids(1, 5)]
    one_left = [*both[:1], [(1, 4)]]
    with pytest.raises(
        ForeignDumpError, match=r"pass 1: a row at position 4 may go on with any of 2 requests"
    ):
        sequences([head(one, tops=False) for one in one_left])


def test_a_request_that_ended_does_not_stand_in_the_way() -> None:
    passes = [
        chunk(0, 0, 4) + chunk(1, 0, 5),
        [(1, 5)],
        [(1, 6)],
        [*chunk(2, 0, 4), (1, 7)],
        [(1, 8), (2, 4)],
    ]
    assert sequences([head(one) for one in passes]) == [ids(0, 4), ids(1, 9), ids(2, 5)]


def test_a_preempted_request_is_computed_once_more() -> None:
    passes = [
        chunk(0, 0, 4) + chunk(1, 0, 3),
        [(0, 4), (1, 3)],
        [(0, 5)],
        [*chunk(1, 0, 5), (0, 6)],
        [(0, 7), (1, 5)],
    ]
    plan = planned([head(one) for one in passes])
    assert [one.ids for one in plan.sequences] == [ids(0, 8), ids(1, 6)]
    assert plan.dropped == {REPEATED: 4}
    assert [one.prompt for one in plan.sequences] == [4, 3]


def test_profiling_padding_and_a_lost_beginning_are_counted() -> None:
    profile = PassHead((0,) * 8, (0,) * 8, None, (), None, True)
    passes = [head(chunk(0, 0, 4)), head([(0, 4), None, None]), head([(0, 5), None, None])]
    plan = planned([profile, *passes, head([(3, 40)], tops=False)])
    assert [one.ids for one in plan.sequences] == [ids(0, 6)]
    assert plan.dropped == {PROFILING: 8, PADDING: 4, UNFINISHED: 1}


def test_a_token_that_was_taken_back_goes_with_all_after_it() -> None:
    """Speculative decoding: rows of the draft that were rejected are computed again with another token."""
    named = [(chunk(0, 0, 4), None), (chunk(0, 4, 7), None), ([(0, 5)], 99), ([(0, 6)], None)]
    heads = [replace(head(rows), requests=("a",) * len(rows)) for rows, _ in named]
    heads[2] = replace(heads[2], ids=(99,))
    plan = planned(heads)
    assert plan.sequences[0].ids == (*ids(0, 5), 99, token(0, 6))
    assert plan.dropped == {REJECTED: 2}


def test_a_name_given_to_another_request_is_another_sequence() -> None:
    first, second = chunk(0, 0, 4), chunk(1, 0, 3)
    heads = [replace(head(rows), requests=("0",) * len(rows)) for rows in (first, [(0, 4)], second, [(1, 3)])]
    assert [one.ids for one in planned(heads).sequences] == [ids(0, 5), ids(1, 4)]


def test_nothing_from_its_first_token_on_is_an_error() -> None:
    with pytest.raises(ForeignDumpError, match="no request was recorded from its first token on"):
        planned([head(chunk(0, 7, 9), tops=False)])


@st.composite
def runs(draw: st.DrawFn, stated: bool) -> list[list[At]]:
    """Requests that come and go, in chunks, some waiting for a while; where tokens show it (`stated`) in any order."""
    count = draw(st.integers(1, 4))
    prompts = [draw(st.integers(2, 7)) for _ in range(count)]
    ends = [prompt + draw(st.integers(0, 4)) for prompt in prompts]
    done = [0] * count
    passes: list[list[At]] = []
    while any(at < end for at, end in zip(done, ends, strict=True)):
        one: list[At] = []
        for seq in draw(st.permutations(range(count))) if stated else range(count):
            left = prompts[seq] - done[seq]
            if done[seq] < ends[seq] and not (one and draw(st.integers(0, 3)) == 0):
                size = 1 if left <= 0 else left if left < 4 else draw(st.integers(2, left))
                one += chunk(seq, done[seq], done[seq] + size)
                done[seq] += size
        passes.append(one)
    return passes


@settings(max_examples=150, deadline=None)
@given(data=st.data(), tops=st.booleans(), greedy=st.booleans())
def test_rows_are_given_to_their_request_or_refused(data: st.DataObject, tops: bool, greedy: bool) -> None:
    """With what greedy logits chose every run is named right; without it, right or not at all."""
    passes = data.draw(runs(tops and greedy))
    try:
        found = sequences([head(one, tops=tops, greedy=greedy) for one in passes])
    except ForeignDumpError:
        assert not (tops and greedy)
        return
    lengths: dict[int, int] = {}
    for one in passes:
        for at in one:
            assert at is not None
            lengths[at[0]] = at[1] + 1
    right = sorted(ids(seq, size) for seq, size in lengths.items())
    assert sorted(found) == right


@pytest.mark.parametrize("refused", [0, 1])
def test_drafts_are_no_part_of_the_prompt(refused: int) -> None:
    """Two drafts come with the token before them, of which the last may be taken back."""
    prompt = replace(head(chunk(0, 0, 5)), requests=("a",) * 5)
    rows = chunk(0, 5, 8)
    reported = tuple(token(0, position + 1) for _, position in chunk(0, 5, 8))
    drafted = replace(head(rows), requests=("a",) * 3, tops=reported, top_rows=(0, 1, 2))
    if refused:
        drafted = replace(drafted, ids=(*drafted.ids[:2], 1))
    after = replace(head(chunk(0, 8 - refused, 9)), requests=("a",) * (1 + refused))
    if refused:
        after = replace(after, tops=(token(0, 8), token(0, 9)), top_rows=(0, 1))
    (one,) = planned([prompt, drafted, after]).sequences
    assert (one.ids, one.prompt) == (ids(0, 9), 5)
