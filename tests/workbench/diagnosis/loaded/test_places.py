"""Which part of a dimension a rank has, and how stacks of experts are cut."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from lockstep.engine.parallel.shards import Span
from lockstep.workbench.diagnosis.loaded.places import Parameters, key_of, part_of


@pytest.mark.parametrize(
    ("whole", "local", "rank", "size", "padded", "expected"),
    [
        (8, 8, 1, 2, False, Span(0, 8)),
        (8, 4, 1, 2, False, Span(4, 8)),
        (2, 1, 3, 4, False, Span(1, 2)),  # two heads on four ranks
        (7, 4, 0, 2, False, Span(0, 4)),
        (7, 3, 1, 2, False, Span(4, 7)),  # as torch.chunk cuts
        (100, 64, 1, 2, True, Span(64, 100)),
        (8, 2, 0, 2, False, None),
        (8, 16, 0, 2, False, None),
        (100, 64, 1, 2, False, None),
    ],
)
def test_part_of(whole: int, local: int, rank: int, size: int, padded: bool, expected: Span | None) -> None:
    assert part_of(whole, local, rank, size, padded=padded) == expected


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("model.layers.3.mlp.up_proj.weight", "layers.3.mlp.up_proj.weight"),
        (
            "base_model.model.model.layers.3.self_attn.q_proj.base_layer.weight",
            "layers.3.self_attn.q_proj.weight",
        ),
        ("model.layers.0.block_sparse_moe.experts.2.w3.weight", "layers.0.mlp.experts.2.up_proj.weight"),
        ("model.language_model.embed_tokens.weight", "embed_tokens.weight"),
    ],
)
def test_key_of(name: str, key: str) -> None:
    assert key_of(name) == key


def experts() -> Parameters:
    """Eight experts of width 6 over a stream of 4."""
    shapes = {
        f"model.layers.0.mlp.experts.{e}.{one}_proj.weight": (4, 6) if one == "down" else (6, 4)
        for e in range(8)
        for one in ("gate", "up", "down")
    }
    source: Any = SimpleNamespace(
        names=lambda: set(shapes), info=lambda name: SimpleNamespace(shape=shapes[name])
    )
    return Parameters(source, tied=False)


@pytest.mark.parametrize(
    ("name", "shape", "rank", "size", "first"),
    [
        ("w13_weight", (8, 12, 4), 0, 1, ("0.gate", Span(0, 6), Span(0, 4))),
        ("w13_weight", (8, 6, 4), 1, 2, ("0.gate", Span(3, 6), Span(0, 4))),  # each expert is cut
        ("w13_weight", (4, 12, 4), 1, 2, ("4.gate", Span(0, 6), Span(0, 4))),  # they are divided
        ("w13_weight", (4, 6, 4), 3, 4, ("4.gate", Span(3, 6), Span(0, 4))),  # both
        ("w2_weight", (8, 4, 3), 1, 2, ("0.down", Span(0, 4), Span(3, 6))),
        ("gate_up_proj", (8, 12, 4), 0, 1, ("0.gate", Span(0, 6), Span(0, 4))),
    ],
)
def test_stacked_experts(
    name: str, shape: tuple[int, ...], rank: int, size: int, first: tuple[str, Span, Span]
) -> None:
    places = experts().places(f"model.layers.0.mlp.experts.{name}", shape, rank, size)
    assert places is not None
    assert len(places) == shape[0] * (1 if "2_" in name else 2)
    parameter, taken, columns = first
    assert places[0].parameter == f"model.layers.0.mlp.experts.{parameter}_proj.weight"
    assert (places[0].taken, places[0].columns, places[0].matrix) == (taken, columns, 0)


def test_a_stack_of_another_shape_is_no_part() -> None:
    assert experts().places("model.layers.0.mlp.experts.w13_weight", (8, 10, 4), 0, 2) == []
    assert experts().places("model.layers.0.mlp.unheard_of.weight", (8, 10), 0, 2) is None
