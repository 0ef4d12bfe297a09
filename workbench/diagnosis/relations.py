"""Two checkpoints of one model, tensor by tensor: equal, rounded, quantised, permuted, transposed, or another tensor.

A stored value may be off by what its type can do: half of its last place where it was rounded to 16 bits, half a step
of its block's scale, and the rounding of that scale, where it was quantised (llama.cpp stores the nearest value that
the block can hold). An element outside its group's range was cut off there, by CUT steps at most. What is off by more
is no quantisation.

Both are read in Hugging Face's names and layouts. Torch is loaded when tensors are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Literal

import numpy as np

from engine.checkpoint.block_types import PLAIN
from engine.checkpoint.gguf.names import PairRows
from engine.checkpoint.gguf.source import GgufSource
from engine.checkpoint.source import Source, TensorInfo
from engine.config import ModelConfig
from engine.parallel import shards
from engine.parallel.shards import Span
from workbench.diagnosis.nearest import nearest_columns

if TYPE_CHECKING:
    from torch import Tensor

Kind = Literal["equal", "rounded", "quantised", "permuted", "transposed", "factor", "different", "missing"]

#: Elements that are compared at a time.
PIECE = 1 << 22
#: Steps by which an element may lie outside the range of its group.
CUT = 1.5
#: Rows, and elements, up to which a permutation or a transposition is looked for.
MOST_ROWS, MOST_ELEMENTS = 8192, 1 << 26
#: Relative error above which two tensors are not the same numbers in the same places.
UNLIKE = 0.5
#: Values of each row that tell it from others.
FINGERPRINT = 64


@dataclass(frozen=True, slots=True)
class TensorRelation:
    """How the second checkpoint's tensor is made from the first's.

    `within`: all that separates them (after `layout` was undone) is what the types can do. `beyond` counts the elements
    that are not; `steps` is the largest error in steps of the block, 0 where nothing is quantised. `types` are those
    of the two files.
    """

    name: str
    kind: Kind
    within: bool
    types: tuple[str, str]
    layout: str = ""
    max_abs: float = 0.0
    rel_l2: float = 0.0
    steps: float = 0.0
    beyond: int = 0
    elements: int = 0


@dataclass(slots=True)
class _Tally:
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


def relations(
    first: Source, second: Source, model: ModelConfig, pattern: str = "*"
) -> Iterator[TensorRelation]:
    """Each tensor whose name matches the glob, in the forward's order."""
    names = first.names() | second.names()
    order = [*(name for name in shards.parameters(model) if name in names)]
    for name in [*order, *sorted(names - set(order))]:
        if fnmatchcase(name, pattern):
            yield _relation(first, second, name, model)


def _relation(first: Source, second: Source, name: str, model: ModelConfig) -> TensorRelation:
    a, b = _Side.of(first, name), _Side.of(second, name)
    types = "" if a is None else a.type, "" if b is None else b.type
    if a is None or b is None:
        lacking = "first" if a is None else "second"
        return TensorRelation(name, "missing", False, types, f"the {lacking} has no such tensor")
    shapes = a.info.shape, b.info.shape
    if shapes[0] != shapes[1]:
        if len(shapes[0]) == 2 and shapes[0] == shapes[1][::-1]:
            return _rearranged(a, b, types, model)
        words = " instead of ".join("×".join(map(str, shape)) for shape in reversed(shapes))
        return TensorRelation(name, "different", False, types, f"shape {words}")
    tally = _Tally()
    for span in _spans(a.info):
        _compare(_Piece.read(a, span), _Piece.read(b, span), tally)
    if tally.beyond and tally.rel_l2 > UNLIKE:
        found = _rearranged(a, b, types, model)
        if found.kind != "different":
            return replace(found, name=name)
    return _judged(name, types, tally, a.info.numel)


HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


@dataclass(frozen=True, slots=True)
class _Side:
    """One tensor of one checkpoint."""

    source: Source
    name: str

    @classmethod
    def of(cls, source: Source, name: str) -> _Side | None:
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


def _judged(
    name: str, types: tuple[str, str], tally: _Tally, elements: int, layout: str = ""
) -> TensorRelation:
    kind: Kind = "equal" if not tally.unequal else "quantised" if tally.steps else "rounded"
    if tally.beyond:
        kind, by = "different", tally.product / tally.squares if tally.squares else 0.0
        rest = tally.other_squares - by * tally.product
        if by and rest <= 1e-6 * tally.other_squares:
            kind, layout = "factor", f"{by:.6g} times the first"
    return TensorRelation(
        name,
        kind,
        not tally.beyond,
        types,
        layout,
        tally.max_abs,
        tally.rel_l2,
        tally.steps,
        tally.beyond,
        elements,
    )


def _spans(info: TensorInfo) -> Iterator[Span | None]:
    """Rows to read at a time; None for a tensor without."""
    if not info.shape or not info.numel:
        yield None
        return
    rows = max(1, PIECE * info.shape[0] // info.numel)
    for start in range(0, info.shape[0], rows):
        yield Span(start, min(start + rows, info.shape[0]))


@dataclass(frozen=True, slots=True)
class _Piece:
    """Rows of a tensor: float64 values, by how much each may be off, and where it is quantised the step of each and
    the range of its group."""

    values: Tensor
    bound: Tensor
    steps: Tensor | None = None
    low: Tensor | None = None
    high: Tensor | None = None

    @classmethod
    def read(cls, side: _Side, span: Span | None) -> _Piece:
        import torch

        source, name, dim = side.source, side.name, None if span is None else 0
        if (
            isinstance(source, GgufSource)
            and (info := source.info(name)).encoding not in PLAIN
            and len(info.shape) > 1
        ):
            from engine.checkpoint.dequantise import dequantise, steps

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

    def map(self, change: Callable[[Tensor], Tensor]) -> _Piece:
        """All parts rearranged alike."""
        parts = (self.steps, self.low, self.high)
        return _Piece(
            change(self.values),
            change(self.bound),
            *(None if part is None else change(part) for part in parts),
        )


def _compare(a: _Piece, b: _Piece, tally: _Tally) -> None:
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


def _rearranged(a: _Side, b: _Side, types: tuple[str, str], model: ModelConfig) -> TensorRelation:
    """The tensor with its rows in another order, or transposed; "different" where it is neither."""
    import torch

    info, name = a.info, a.name
    unlike = TensorRelation(
        name, "different", False, types, "other numbers", beyond=info.numel, elements=info.numel
    )
    if info.numel > MOST_ELEMENTS or not info.shape:
        return unlike
    x, y = _Piece.read(a, None), _Piece.read(b, None)
    if x.values.dim() == 2 and x.values.shape == y.values.shape[::-1]:
        tally = _Tally()
        _compare(x, y.map(lambda part: part.T), tally)
        if tally.rel_l2 <= UNLIKE:
            found = _judged(name, types, tally, info.numel)
            return replace(found, kind="transposed", layout="rows and columns exchanged")
    if info.shape[0] > MOST_ROWS or x.values.shape != y.values.shape:
        return unlike
    order = torch.tensor(_row_order(x.values, y.values))
    tally = _Tally()
    _compare(x.map(lambda part: part[order]), y, tally)
    if tally.rel_l2 > UNLIKE or len(set(order.tolist())) < len(order):
        return unlike
    return replace(_judged(name, types, tally, info.numel), kind="permuted", layout=_named(order, model))


def _row_order(a: Tensor, b: Tensor) -> list[int]:
    """For each row of `b` the row of `a` that it is: by values, of vectors by their rank."""
    if a.dim() == 1:
        order = np.empty(len(a), dtype=np.int64)
        order[np.argsort(b.numpy(), kind="stable")] = np.argsort(a.numpy(), kind="stable")
        return order.tolist()
    width = a.shape[1]
    columns = np.linspace(0, width - 1, min(width, FINGERPRINT)).astype(np.int64)
    return nearest_columns(b.numpy()[:, columns].T, a.numpy()[:, columns].T)


def _named(order: Tensor, model: ModelConfig) -> str:
    """What order of rows this is."""
    import torch

    rows = torch.arange(len(order))
    if len(order) % model.head_dim == 0:
        pairs = PairRows(model.head_dim)
        if torch.equal(order, pairs.to_gguf(rows)):
            return "rows of each head as (0, D/2, 1, …): the order of GGUF's llama, not undone"
        if torch.equal(order, pairs.from_gguf(rows)):
            return (
                "rows of each head as (0, 2, 4, …): the order of GGUF's llama undone where it was not there"
            )
    first = int((order != rows).nonzero()[0]) if not torch.equal(order, rows) else 0
    return f"rows in another order: row {first} is the first's row {int(order[first])}"
