"""The matrices of a rank: dense, or kept as the blocks of a GGUF file and dequantised whenever they are used.

Both kinds give a layer the same numbers: a kept matrix is multiplied in the layout that the dense one has. `parts()`
maps checkpoint names to what loading fills: views of a dense matrix, or a `KeptTensor` each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import prod

import torch
import torch.nn.functional as F
from torch import Tensor

from lockstep.engine.checkpoint.gguf.source import Blocks
from lockstep.engine.errors import CheckpointError
from lockstep.engine.rules import CORRECT, Rules

#: Elements that a kept matrix is made dense at a time, whole rows: 64 MiB of float32.
PIECE = 1 << 24
EVEN = 256  # rows
#: MKL adds a float32 product of fewer rows in another order; from here on a row is the same however many there are.
SAME_ROWS = 4


class DenseMatrix:
    """The tensors of one product, stacked by rows: [sum of rows, columns]."""

    def __init__(self, names: Sequence[str], rows: Sequence[int], columns: int, store: Store) -> None:
        self.names, self.rows, self.dtype, self.device = tuple(names), tuple(rows), store.dtype, store.device
        self._store = store
        self._dense = torch.empty((sum(rows), columns), dtype=store.dtype, device=store.device)

    def parts(self) -> dict[str, Tensor]:
        """Checkpoint name -> its rows, as views."""
        return dict(zip(self.names, self._dense.split(self.rows), strict=True))

    def product(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """[T, columns] -> [T, rows]."""
        return self._store.linear(x, self._dense, bias)

    def look_up(self, ids: Tensor) -> Tensor:
        """Rows by their numbers: [T] -> [T, columns]."""
        return F.embedding(ids, self._dense)


@dataclass(slots=True)
class KeptTensor:
    """One tensor's shard in the file's own blocks; `blocks` is None until it is loaded."""

    name: str
    shape: tuple[int, int]
    store: Store
    blocks: Blocks | None = None

    @property
    def nbytes(self) -> int:
        return 0 if self.blocks is None else self.blocks.raw.nbytes

    def fill(self, blocks: Blocks) -> None:
        """Take the blocks that cover this rank's slice."""
        shape = (blocks.raw.shape[0], blocks.columns.size)
        if shape != self.shape:
            raise CheckpointError(
                f"{self.name}: the shard is {list(shape)}, this rank holds {list(self.shape)}"
            )
        self.blocks = replace(blocks, raw=blocks.raw.to(self.store.device))

    def values(self, rows: slice | Tensor = slice(None)) -> Tensor:
        """All rows or some, as loading would have put them into a dense matrix."""
        if self.blocks is None:
            raise CheckpointError(f"{self.name}: no blocks were loaded")
        rules, some = self.store.rules, self.store.by_rows
        chosen = replace(self.blocks, raw=self.blocks.raw[rows]) if some else self.blocks
        found = chosen.values(partial(rules.dequantise, self.name)).to(self.store.dtype)
        return found if some else rules.stored(self.name, found)[rows]


class KeptMatrix:
    """A `DenseMatrix` whose tensors stay in blocks."""

    def __init__(self, names: Sequence[str], rows: Sequence[int], columns: int, store: Store) -> None:
        self.dtype, self.device, self._store = store.dtype, store.device, store
        self._parts = [KeptTensor(n, (size, columns), store) for n, size in zip(names, rows, strict=True)]
        self._shape = (sum(rows), columns)

    def parts(self) -> dict[str, KeptTensor]:
        """Checkpoint name -> its blocks."""
        return {part.name: part for part in self._parts}

    def product(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """[T, columns] -> [T, rows]."""
        total, columns = self._shape
        pieces = -(-total * columns // PIECE)
        # Even, whole multiples: fewer rows, or rows at another place in a vector, are summed in another order.
        size = -(-total // (pieces * EVEN)) * EVEN
        products = []
        for start in range(0, total, size):
            stop = min(start + size, total)
            own = None if bias is None else bias[start:stop]
            products.append(self._store.linear(x, self._dense(start, stop), own))
        return products[0] if len(products) == 1 else torch.cat(products, -1)

    def _dense(self, start: int, stop: int) -> Tensor:
        """Those rows, in memory that the next ones will take over."""
        dense = self._store.scratch((stop - start, self._shape[1]))
        first = 0  # row of the part under way
        for part in self._parts:
            low, high = max(start, first), min(stop, first + part.shape[0])
            if low < high:
                dense[low - start : high - start] = part.values(slice(low - first, high - first))
            first += part.shape[0]
        return dense

    def look_up(self, ids: Tensor) -> Tensor:
        """Rows by their numbers: only those are dequantised."""
        (part,) = self._parts
        return part.values(ids)


class Store:
    """What a decoder's weights are made of: dtype and device, and whether matrices are kept in blocks."""

    def __init__(
        self,
        dtype: torch.dtype,
        device: torch.device,
        rules: Rules,
        *,
        kept: bool,
        batch_invariant: bool = False,
    ) -> None:
        self.dtype, self.device, self.rules, self.kept = dtype, device, rules, kept
        self._batch_invariant = batch_invariant
        #: Whether rows can be made dense one by one: what replaces `stored` may look at the whole tensor.
        self.by_rows = rules.stored is CORRECT.stored
        self._scratch = torch.empty(0, dtype=dtype, device=device)

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """[T, in] -> [T, out]; `batch_invariant`: each row the same bits whatever T is."""
        missing = SAME_ROWS - len(x) if self._batch_invariant else 0
        if missing <= 0:
            return F.linear(x, weight, bias)
        return F.linear(F.pad(x, (0, 0, 0, missing)), weight, bias)[: len(x)]

    def matrix(self, names: Sequence[str], rows: Sequence[int], columns: int) -> DenseMatrix | KeptMatrix:
        """Room for the tensors of one product."""
        return (KeptMatrix if self.kept else DenseMatrix)(names, rows, columns, self)

    def vector(self, size: int) -> Tensor:
        """Room for a norm's weight."""
        return torch.empty(size, dtype=self.dtype, device=self.device)

    def bias(self, size: int) -> Tensor:
        """Room for a bias. One that is never written must read as "no bias", not as stale memory."""
        return torch.zeros(size, dtype=self.dtype, device=self.device)

    def scratch(self, shape: tuple[int, int]) -> Tensor:
        """Memory for one dense matrix, the same for all of them."""
        if self._scratch.numel() < prod(shape):
            self._scratch = torch.empty(prod(shape), dtype=self.dtype, device=self.device)
        return self._scratch[: prod(shape)].view(shape)
