"""Two checkpoints of one model, tensor by tensor: equal, rounded, quantised, permuted, transposed, or another tensor.

What a stored value may be off by is `stored_tensors`' matter: what is off by more is no quantisation. Both are read in
Hugging Face's names and layouts. Torch is loaded when tensors are.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Literal

import numpy as np

from lockstep.engine.checkpoint.gguf.names import PairRows
from lockstep.engine.checkpoint.source import Source
from lockstep.engine.config import ModelConfig
from lockstep.engine.parallel import shards
from lockstep.workbench.diagnosis.nearest import nearest_columns
from lockstep.workbench.diagnosis.stored_tensors import (
    DifferenceTally,
    Piece,
    StoredTensor,
    compare_pieces,
    spans_of,
)

if TYPE_CHECKING:
    from torch import Tensor

Kind = Literal["equal", "rounded", "quantised", "permuted", "transposed", "factor", "different", "missing"]

#: Rows, and elements, up to which a permutation or a transposition is looked for.
MOST_ROWS, MOST_ELEMENTS = 8192, 1 << 26
#: Relative error above which two tensors are not the same numbers in the same places.
UNLIKE = 0.5
#: Values of each row that distinguish it from others.
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
    a, b = StoredTensor.of(first, name), StoredTensor.of(second, name)
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
    tally = DifferenceTally()
    for span in spans_of(a.info):
        compare_pieces(Piece.read(a, span), Piece.read(b, span), tally)
    if tally.beyond and tally.rel_l2 > UNLIKE:
        found = _rearranged(a, b, types, model)
        if found.kind != "different":
            return replace(found, name=name)
    return _judged(name, types, tally, a.info.numel)


def _judged(
    name: str, types: tuple[str, str], tally: DifferenceTally, elements: int, layout: str = ""
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


def _rearranged(
    a: StoredTensor, b: StoredTensor, types: tuple[str, str], model: ModelConfig
) -> TensorRelation:
    """The tensor with its rows in another order, or transposed; "different" where it is neither."""
    import torch

    info, name = a.info, a.name
    unlike = TensorRelation(
        name, "different", False, types, "other numbers", beyond=info.numel, elements=info.numel
    )
    if info.numel > MOST_ELEMENTS or not info.shape:
        return unlike
    x, y = Piece.read(a, None), Piece.read(b, None)
    if x.values.dim() == 2 and x.values.shape == y.values.shape[::-1]:
        tally = DifferenceTally()
        compare_pieces(x, y.map(lambda part: part.T), tally)
        if tally.rel_l2 <= UNLIKE:
            found = _judged(name, types, tally, info.numel)
            return replace(found, kind="transposed", layout="rows and columns exchanged")
    if info.shape[0] > MOST_ROWS or x.values.shape != y.values.shape:
        return unlike
    order = torch.tensor(_row_order(x.values, y.values))
    tally = DifferenceTally()
    compare_pieces(x.map(lambda part: part[order]), y, tally)
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
