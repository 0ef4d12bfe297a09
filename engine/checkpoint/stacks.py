"""Where a checkpoint stacks tensors: q, k, v in `qkv_proj`, gate and up in `gate_up_proj`, the matrices of experts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from lockstep.engine.config import ModelConfig
from lockstep.engine.config.experts import ExpertsConfig
from lockstep.engine.graph import operation_of
from lockstep.engine.graph.checkpoint_names import FUSED
from lockstep.engine.parallel import shards
from lockstep.engine.parallel.shards import Span

if TYPE_CHECKING:
    import torch


A = TypeVar("A")


class Place(NamedTuple):
    """Where a parameter lies: in which rows of a tensor of the checkpoint, every `step`-th of them, of a stack of
    matrices (or vectors) in those of the one with that number. `shape` is the tensor's; of a `transposed` matrix rows
    are the last axis."""

    tensor: str
    rows: Span
    shape: tuple[int, ...]
    matrix: int | None = None
    step: int = 1
    transposed: bool = False

    @property
    def parameter_shape(self) -> tuple[int, ...]:
        """Of the parameter."""
        inner = self.shape if self.matrix is None else self.shape[1:]
        inner = inner[::-1] if self.transposed else inner
        return len(range(self.rows.start, self.rows.stop, self.step)), *inner[1:]

    def of(self, whole: torch.Tensor) -> torch.Tensor:
        """The parameter, as a view of the tensor."""
        return self.within(whole if self.matrix is None else whole[self.matrix])

    def within(self, matrix: A) -> A:
        """The same of the one matrix or vector, a tensor or an array."""
        one: Any = matrix
        found: A = (one.T if self.transposed else one)[self.rows.start : self.rows.stop : self.step]
        return found


def stored_in(model: ModelConfig) -> dict[str, Place]:
    """Parameter -> where it lies in a checkpoint that stacks it; of those that may be stacked."""
    found: dict[str, Place] = {}
    for i in range(model.num_layers):
        shapes = shards.layer_parameters(model, i)
        places = dict(_rows_of(model, shapes)) | dict(_experts_of(model.of_layer(i)))
        for part, place in places.items():
            found[f"model.layers.{i}.{part}"] = place._replace(tensor=f"model.layers.{i}.{place.tensor}")
    return found


def _rows_of(model: ModelConfig, shapes: Mapping[str, tuple[int, ...]]) -> Iterator[tuple[str, Place]]:
    """Of a layer's stacks by rows."""
    for whole, modules in FUSED.get(model.family, {}).items():
        parts = [shapes[f"{one}.weight"] for one in modules]
        start, shape = 0, (sum(part[0] for part in parts), *parts[0][1:])
        for module, part in zip(modules, parts, strict=True):
            yield f"{module}.weight", Place(f"{whole}.weight", Span(start, start + part[0]), shape)
            start += part[0]


def _experts_of(model: ModelConfig) -> Iterator[tuple[str, Place]]:
    """Of a layer's experts as transformers has them, and of a router that it calls otherwise than the checkpoint."""
    if (has := model.experts) is None:
        return
    gate, up, down, router = (
        "" if (one := operation_of(model, f"mlp.{tap}")) is None else one.module
        for tap in ("experts.gate", "experts.up", "experts.down", "router")
    )
    hidden, width = model.hidden_size, has.width
    if model.family == "gpt_oss":
        for e in range(has.count):
            yield from _interleaved(e, (gate.format(e), up.format(e), down.format(e)), has, hidden)
        return
    both, single = (has.count, 2 * width, hidden), (has.count, hidden, width)
    for e in range(has.count):
        yield f"{gate.format(e)}.weight", Place("mlp.experts.gate_up_proj", Span(0, width), both, e)
        yield f"{up.format(e)}.weight", Place("mlp.experts.gate_up_proj", Span(width, 2 * width), both, e)
        yield f"{down.format(e)}.weight", Place("mlp.experts.down_proj", Span(0, hidden), single, e)
    if router != "mlp.gate":
        yield f"{router}.weight", Place("mlp.gate.weight", Span(0, has.count), (has.count, hidden))
    if has.correction and not (name := shards.correction_name(model)).startswith("mlp."):
        yield name, Place(f"mlp.{shards.CORRECTION}", Span(0, has.count), (has.count,))


def _interleaved(
    e: int, modules: tuple[str, str, str], has: ExpertsConfig, hidden: int
) -> Iterator[tuple[str, Place]]:
    """Of an expert of gpt-oss: matrices transposed, gate and up in turn."""
    stack, both, (gate, up, down) = "mlp.experts", 2 * has.width, modules
    for module, first in ((gate, 0), (up, 1)):
        rows = Span(first, both)
        shape = (has.count, hidden, both)
        yield f"{module}.weight", Place(f"{stack}.gate_up_proj", rows, shape, e, 2, True)
        yield f"{module}.bias", Place(f"{stack}.gate_up_proj_bias", rows, (has.count, both), e, 2)
    rows, shape = Span(0, hidden), (has.count, has.width, hidden)
    yield f"{down}.weight", Place(f"{stack}.down_proj", rows, shape, e, transposed=True)
    yield f"{down}.bias", Place(f"{stack}.down_proj_bias", rows, (has.count, hidden), e)


def whole_stacks(model: ModelConfig, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Place]:
    """As `stored_in`, of the stacks that are there in their shape; `shapes` by the names of tensors."""
    return {name: one for name, one in stored_in(model).items() if shapes.get(one.tensor) == one.shape}
