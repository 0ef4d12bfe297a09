"""What ranks hold of stacks of matrices that are cut otherwise than they lie, against torch's own cuts."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from lockstep.engine.config import ModelConfig
from lockstep.engine.graph import GATE_UP, QKV
from lockstep.workbench.diagnosis.hypotheses.products import stacks
from lockstep.workbench.diagnosis.hypotheses.products.stacks import stack_of, wrongly_cut
from tests.checkpoints import tiny_config

RANKS = 2
BA = ("attn.in_proj_b", "attn.in_proj_a")


def site(kind: str, model: ModelConfig, rank: int, span: slice | None) -> Any:
    facts = SimpleNamespace(model=model.of_layer(0), whole=model)
    taps = SimpleNamespace(ranks=range(RANKS))
    first = span.start if span else 0
    return SimpleNamespace(kind=kind, rank=rank, facts=facts, taps=taps, span=span, first_out=first, layer=0,
                           near=lambda tap: f"layers.0.{tap}")  # fmt: skip


def test_a_stack_that_lies_head_by_head() -> None:
    """Qwen3-Next's b and a: a rank takes its half of the first half of the rows for b, of the second half for a."""
    model = ModelConfig.from_hf(tiny_config("qwen3_next").to_dict())
    linear = model.of_layer(0).linear
    assert linear is not None
    assert set(stack_of(site(BA[0], model, 0, None))) == set(BA)
    heads, group = linear.key_heads, linear.group
    numbers = torch.arange(2 * heads * group)  # of all of b, then of all of a
    stack = numbers.view(2, heads, group).transpose(0, 1).flatten()  # as it lies: b and a of each head
    held = torch.cat(
        [torch.cat([half.chunk(RANKS)[rank] for half in stack.chunk(2)]) for rank in range(RANKS)]
    )
    read = held.view(heads, 2, group)
    for i, kind in enumerate(BA):
        found = dict(wrongly_cut(site(kind, model, 0, None), BA, np.arange(heads * group)))
        (words,) = [text for text, rows in found.items() if rows.tolist() == read[:, i].flatten().tolist()]
        assert "head by head" in words
        assert "2 matrices one behind the other" in words


@pytest.mark.parametrize("rank", range(RANKS))
def test_a_stack_of_one_matrix_behind_the_other(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gate and up, cut as if they were one matrix: rank 0 has all of the gate, rank 1 all of up."""
    model = ModelConfig.from_hf(tiny_config("llama").to_dict())
    width = model.intermediate_size
    part = slice(rank * width // RANKS, (rank + 1) * width // RANKS)
    spans = lambda tap, operation, rank, *_: (slice(rank * width // RANKS, (rank + 1) * width // RANKS), None)  # noqa: E731
    monkeypatch.setattr(stacks, "rank_spans", spans)
    held = torch.arange(2 * width).chunk(RANKS)[rank].chunk(2)
    for i, kind in enumerate(GATE_UP):
        ((words, rows),) = wrongly_cut(site(kind, model, rank, part), GATE_UP, np.arange(width // RANKS))
        assert rows.tolist() == held[i].tolist()
        assert (
            words
            == "the stack of gate and up, which lie one behind the other in it, is cut into ranks as one matrix"
        )


@pytest.mark.parametrize("rank", range(RANKS))
def test_heads_that_several_ranks_have_are_no_equal_parts_of_a_stack(
    rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of two ranks has the one key and value head: more rows than half of the stack."""
    model = ModelConfig.from_hf(tiny_config("llama", num_key_value_heads=1).to_dict())
    queries, one = model.num_heads * model.head_dim, model.head_dim

    def spans(tap: str, operation: str, rank: int, *_: object) -> tuple[slice, None]:
        each = queries // RANKS
        return (slice(rank * each, (rank + 1) * each) if tap.endswith("q_proj") else slice(0, one)), None

    monkeypatch.setattr(stacks, "rank_spans", spans)
    assert not list(wrongly_cut(site("attn.k_proj", model, rank, slice(0, one)), QKV, np.arange(one)))
