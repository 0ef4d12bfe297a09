"""Tensors of two checkpoints as they are stored: their values, and by how much each may be off for its type.

A value may be off by half of its last place where it was rounded to 16 bits, by half a step of its block's scale, and
the rounding of that scale, where it was quantised (llama.cpp stores the nearest value that the block can hold). An
element outside its group's range was cut off there, by CUT steps at most. Torch is loaded when tensors are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lockstep.engine.checkpoint.block_types import PLAIN
from lockstep.engine.checkpoint.gguf.source import GgufSource
from lockstep.engine.checkpoint.source import Source, TensorInfo
from lockstep.engine.parallel.shards import Span

if TYPE_CHECKING:
    from torch import Tensor

#: Elements that are compared at a time.
PIECE = 1 << 22
#: Steps by which an element may lie outside the range of its group.
CUT = 1.5


@dataclass(slots=True)
class DifferenceTally:
    """What was found so far of one tensor."""

    squares: float = 0.0  # of the first
    other_squares: float = 0.0
    product: float = 0.0
    difference: float = 0.0
    max_abs: float = 0.0
    steps: float = 0.0
    beyond: int = 0
    unequal: int = 0

    @property
    def rel_l2(self) -> float:
        return float((self.difference / self.squares) ** 0.5) if self.squares else float(self.difference > 0)


HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor of one checkpoint."""

    source: Source
    name: str

    @classmethod
    def of(cls, source: Source, name: str) -> StoredTensor | None:
        """The output head of a tied model is its embedding."""
        if name == HEAD and name not in source.names():
            name = EMBEDDING
        return cls(source, name) if name in source.names() else None

    @property
    def info(self) -> TensorInfo:
        return self.source.info(self.name)

    @property
    def type(self) -> str:
        """By ggml's name."""
        info = self.info
        return info.encoding or next(name for name, dtype in PLAIN.items() if dtype == info.dtype)


def spans_of(info: TensorInfo) -> Iterator[Span | None]:
    """Rows to read at a time; None for a tensor without."""
    if not info.shape or not info.numel:
        yield None
        return
    rows = max(1, PIECE * info.shape[0] // info.numel)
    for start in range(0, info.shape[0], rows):
        yield Span(start, min(start + rows, info.shape[0]))


@dataclass(frozen=True, slots=True)
class Piece:
    """Rows of a tensor: float64 values, by how much each may be off, and where it is quantised the step of each and
    the range of its group."""

    values: Tensor
    bound: Tensor
    steps: Tensor | None = None
    low: Tensor | None = None
    high: Tensor | None = None

    @classmethod
    def read(cls, side: StoredTensor, span: Span | None) -> Piece:
        import torch

        source, name, dim = side.source, side.name, None if span is None else 0
        if (
            isinstance(source, GgufSource)
            and (info := source.info(name)).encoding not in PLAIN
            and len(info.shape) > 1
        ):
            from lockstep.engine.checkpoint.dequantise import dequantise, steps

            blocks = source.blocks(name, dim, span)
            values, step = (
                dequantise(blocks.raw, blocks.type).double(),
                steps(blocks.raw, blocks.type).double(),
            )
            groups = values.view(*step.shape, -1)
            spread = step.unsqueeze(-1).expand(groups.shape).reshape(values.shape)
            low, high = (
                edge.unsqueeze(-1).expand(groups.shape).reshape(values.shape)
                for edge in (groups.amin(-1), groups.amax(-1))
            )
            # The converter may choose values by its scale and offset before they are rounded to float16.
            rounding = (high - low + low.abs().maximum(high.abs())) * 2.0**-11
            return cls(values, spread / 2 + rounding, spread, low, high)
        stored = source.read(name, dim, span)
        values = stored.double()
        if stored.dtype in (torch.float32, torch.float64):
            return cls(values, torch.zeros_like(values))
        kind = torch.finfo(stored.dtype)
        return cls(values, values.abs() * kind.eps / 2 + kind.smallest_normal * kind.eps)

    def map(self, change: Callable[[Tensor], Tensor]) -> Piece:
        """All parts rearranged alike."""
        parts = (self.steps, self.low, self.high)
        return Piece(
            change(self.values),
            change(self.bound),
            *(None if part is None else change(part) for part in parts),
        )


def compare_pieces(a: Piece, b: Piece, tally: DifferenceTally) -> None:
    error = (b.values - a.values).abs()
    same = (a.values == b.values) | (a.values.isnan() & b.values.isnan())
    inside = error <= a.bound + b.bound
    for side, other in ((a, b), (b, a)):
        if side.steps is None or side.low is None or side.high is None:
            continue
        outside = (other.values > side.high) | (other.values < side.low)
        inside |= outside & (error <= CUT * side.steps)
        if (there := (side.steps > 0) & error.isfinite()).any():
            tally.steps = max(tally.steps, float((error / side.steps)[there].max()))
    finite = a.values.isfinite() & b.values.isfinite()
    x, y = a.values.where(finite, 0.0), b.values.where(finite, 0.0)
    tally.squares += float(x.square().sum())
    tally.other_squares += float(y.square().sum())
    tally.product += float((x * y).sum())
    tally.difference += float((x - y).square().sum())
    tally.max_abs = max(tally.max_abs, float((x - y).abs().max()) if x.numel() else 0.0)
    tally.unequal += int((~same).sum())
    tally.beyond += int((~(inside | same)).sum())
