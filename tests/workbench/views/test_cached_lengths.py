"""Cached lengths by layer and rank: stored so that older files stay readable, and reported where they are odd."""

from __future__ import annotations

import dataclasses
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.sessions import SequenceStep, Session, SessionError
from lockstep.sessions.format import codec
from lockstep.sessions.records import MAX_LAYERS
from lockstep.sessions.verify import verify
from lockstep.workbench.views.cached_lengths import in_words, odd_lengths, rows_of, runs
from tests.sessions.samples import create, record, sequence, tamper, write

R0 = " on rank 0"
RECORDED = Path(__file__).parents[3] / "sessions" / "recorded"


def _with(lengths: object) -> SequenceStep:
    return dataclasses.replace(sequence(4), kv_lens=lengths)


@given(
    layers=st.integers(1, 6),
    ranks=st.integers(1, 4),
    data=st.data(),
)
def test_what_is_odd_is_just_the_cells_that_differ(layers: int, ranks: int, data: st.DataObject) -> None:
    of_rank = st.lists(st.integers(4, 6), min_size=layers, max_size=layers)
    lengths = data.draw(st.lists(of_rank, min_size=ranks, max_size=ranks))
    reported: dict[tuple[int, int], int] = {}
    for odd in odd_lengths(_with(lengths)):
        cells = {(rank, layer) for rank in odd.ranks for layer in range(odd.first, odd.last + 1)}
        assert not cells & reported.keys()
        assert odd.whole == (odd.last - odd.first + 1 == layers)
        reported |= dict.fromkeys(cells, odd.rows)
    right = 5  # step 4 ran the token at position 4
    assert reported == {
        (rank, layer): rows
        for rank, of_rank in enumerate(lengths)
        for layer, rows in enumerate(of_rank)
        if rows != right
    }


@pytest.mark.parametrize(
    ("lengths", "words"),
    [
        ([[5, 5, 5], [5, 5, 5]], ""),
        ([[5, 0, 0], [5, 0, 0]], "0 rows in layers 1–2 on ranks 0, 1"),
        ([[5, 5, 5], [5, 5, 1]], "1 row in layer 2 on rank 1"),
        ([[5, 5, 5], [4, 4, 4]], "4 rows on rank 1"),
        ([[6], [5]], "6 rows on rank 0"),  # an older recording: one length for all layers
        ([[1, 2, 3, 4]], f"1 row in layer 0{R0}; 2 rows in layer 1{R0}; 3 rows in layer 2{R0}; and 1 more"),
        ([], ""),
    ],
)  # fmt: skip
def test_what_is_odd_names_layer_and_rank(lengths: list[list[int]], words: str) -> None:
    assert in_words(odd_lengths(_with(lengths))) == words


def test_a_sequence_without_tokens_asks_for_nothing() -> None:
    assert odd_lengths(dataclasses.replace(_with([[5], [9]]), positions=())) == []


def test_the_length_of_a_layer_or_the_shortest() -> None:
    lengths = [[7, 5, 6], [4, 4, 4]]
    assert [rows_of(lengths, 0, layer) for layer in (0, 1, 2, None, 9)] == [7, 5, 6, 5, 5]
    assert [rows_of([[8], [9]], 1, layer) for layer in (0, 3, None)] == [9, 9, 9]
    assert rows_of([], 0, 0) is None


@given(st.lists(st.integers(0, 2)))
def test_runs_are_the_values_again(values: list[int]) -> None:
    found = runs(values)
    assert [value for first, last, value in found for _ in range(first, last + 1)] == values
    assert all(one[2] != other[2] for one, other in pairwise(found))


# --- in the file -------------------------------------------------------------------------------------


def _stored(path: Path, blob: bytes) -> Path:
    """A session of one step on two ranks in whose row the lengths are replaced."""
    write(path, 1)
    return tamper(path, "UPDATE sequences SET kv_lens = ?", arguments=(blob,))


def test_lengths_of_layers_come_back(tmp_path: Path) -> None:
    lengths = ((5, 0, 3), (5, 5, 5))
    with create(tmp_path / "a.session") as writer:
        writer.step(0, dataclasses.replace(record(0), sequences=[_with(lengths)]))
        writer.step(0, dataclasses.replace(record(1), sequences=[_with(())]))
    with Session.open(tmp_path / "a.session") as session:
        assert [session.step(step).sequences[0].kv_lens for step in (0, 1)] == [lengths, ()]


@pytest.mark.parametrize("path", sorted(RECORDED.glob("*.session")), ids=lambda path: path.stem)
def test_the_shipped_recordings_are_read(path: Path) -> None:
    with Session.open(path) as session:
        for step in session.steps():
            for reported in session.step(step).sequences:
                assert len(reported.kv_lens) == session.ranks
                assert len({len(of_rank) for of_rank in reported.kv_lens}) == 1
                stuck = path.stem == "positions-stuck" and step > 0
                assert bool(odd_lengths(reported)) == stuck


@pytest.mark.parametrize(
    ("count", "words"),
    [
        (3, "3 cached lengths are not equally many for each of 2 ranks"),
        (
            2 * MAX_LAYERS + 2,
            f"a list of {2 * MAX_LAYERS + 2} integers, where at most {2 * MAX_LAYERS} may be",
        ),
    ],
)
def test_lengths_of_a_stranger_are_counted(tmp_path: Path, count: int, words: str) -> None:
    path = _stored(tmp_path / "a.session", codec.encode_ints(range(count)))
    with Session.open(path) as session, pytest.raises(SessionError, match=words):
        session.step(0)
    assert any(words in problem for problem in verify(path))


@pytest.mark.parametrize("lengths", [[[5, 5]], [[5, 5], [5]], [[], []], [[5] * (MAX_LAYERS + 1)] * 2])
def test_lengths_that_contradict_the_session_are_not_written(
    tmp_path: Path, lengths: list[list[int]]
) -> None:
    with create(tmp_path / "a.session") as writer:
        with pytest.raises(ValueError, match="kv_lens"):
            writer.step(0, dataclasses.replace(record(0), sequences=[_with(lengths)]))
        writer.step(0, record(0))
