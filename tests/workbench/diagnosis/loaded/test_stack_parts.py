"""Stacks in an order of their own, divided among ranks: as whole matrices, or each of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from lockstep.workbench.diagnosis.loaded.checkpoint import LoadedFrom
from lockstep.workbench.diagnosis.loaded.compare import LoadedWeights, compare_weights
from lockstep.workbench.diagnosis.loaded.rank_weights import read_ranks
from tests.checkpoints import tiny_checkpoint
from tests.workbench.diagnosis.loaded.ranks import State, whole_of, written

_STACK = "model.layers.1.mlp.experts.gate_up_proj"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Gate and up in turn, transposed, with biases."""
    return tiny_checkpoint(tmp_path_factory.mktemp("model"), "gpt_oss")


def divided(checkpoint: Path, dim: int = 0) -> list[State]:
    """Two ranks, whose stacks of experts are cut along a dimension, of which the biases have no more than two."""

    def part(name: str, rank: int) -> State:
        whole = states[name]
        at = min(dim, whole.ndim - 1)
        return {name: whole.chunk(2, at)[rank].clone() if ".experts." in name else whole.clone()}

    states = whole_of(checkpoint)
    return [{key: x for name in states for key, x in part(name, rank).items()} for rank in range(2)]


def compared(checkpoint: Path, folder: Path, states: list[State]) -> LoadedWeights:
    with LoadedFrom.open(checkpoint) as opened:
        return compare_weights(read_ranks(written(folder / "dump", states)), opened)


@pytest.mark.parametrize("dim", [0, 2])
def test_parts_are_not_accused(dim: int, checkpoint: Path, tmp_path: Path) -> None:
    found = compared(checkpoint, tmp_path, divided(checkpoint, dim))
    assert (found.wrong, found.unknown, found.left_out) == ((), (), ())


def test_experts_of_the_other_rank_are_named(checkpoint: Path, tmp_path: Path) -> None:
    states = divided(checkpoint)
    states[0][_STACK], states[1][_STACK] = states[1][_STACK], states[0][_STACK]
    found = compared(checkpoint, tmp_path, states)
    assert [(one.parameter, one.ranks, one.mistake.text) for one in found.wrong] == [
        (_STACK, (0,), "rank 1's part instead"),
        (_STACK, (1,), "rank 0's part instead"),
    ]


def test_experts_that_one_rank_never_loaded_are_named(checkpoint: Path, tmp_path: Path) -> None:
    states = divided(checkpoint)
    states[1][_STACK].zero_()
    (one,) = compared(checkpoint, tmp_path, states).wrong
    assert (one.parameter, one.ranks, one.mistake.kind) == (_STACK, (1,), "zeros")


def test_experts_that_no_rank_has_are_named(checkpoint: Path, tmp_path: Path) -> None:
    states = divided(checkpoint)
    states[1][_STACK] = states[0][_STACK].clone()
    found = compared(checkpoint, tmp_path, states)
    assert [(one.ranks, one.mistake.text) for one in found.wrong] == [((1,), "rank 0's part instead")]


def test_columns_that_are_divided_in_another_way_are_left_out(checkpoint: Path, tmp_path: Path) -> None:
    """Which columns of each matrix a rank has is the engine's own: nothing is accused, and nothing said to be right."""
    states = divided(checkpoint, 2)
    states[0][_STACK], states[1][_STACK] = states[1][_STACK], states[0][_STACK]
    found = compared(checkpoint, tmp_path, states)
    assert found.wrong == ()
    assert found.left_out == (
        "model.layers.*.mlp.experts.gate_up_proj (a part of a stack in an order of its own)",
    )
