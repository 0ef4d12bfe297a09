"""The matrices of a rank: dense, or kept as the blocks of a GGUF file and dequantised tile by tile when they are used.

Both kinds give a layer the same numbers, but for the order of float32 sums. `parts()` maps checkpoint names to what
loading fills: views of a dense matrix, or a `KeptTensor` each. A dense matrix lies as the checkpoint has it, [out, in],
or, once it is used in an engine for many sequences, as oneDNN reads it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from math import prod

import torch
import torch.nn.functional as F
from torch import Tensor

from lockstep.engine.checkpoint.gguf.source import Blocks
from lockstep.engine.errors import CheckpointError
from lockstep.engine.layers.q8_tiles import BLOCK, Q8Tiles
from lockstep.engine.rows import products
from lockstep.engine.rules import CORRECT, Rules

#: Elements that a kept matrix is made dense at a time, whole rows: 2 MiB of float32, which stay in the cache.
PIECE = 1 << 19
EVEN = 256  # rows
#: Rows of a product where its bits must not depend on how many there are. Libraries choose kernels, and with them the
#: order of sums, by the shape: of float32 below 16 rows, with AMX of bfloat16 even below 200.
SAME_ROWS = 8
#: Tokens up to which a product is bound by reading the weights, so that it is made slab by slab.
FEW_TOKENS = 64
#: Elements from which on a matrix is worth kernels of its own: smaller ones stay in the cache, in any order.
LARGE = 1 << 17
#: Slabs of a matrix, at most, and the rows of a slab, at least: of fewer than 8 MKL adds in another order.
SLABS, SLAB_ROWS = 64, 16


def by_slabs(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`F.linear` of float32 on MKL, as one batched product of equal runs of rows.

    MKL multiplies a single row on a single thread, and a few rows with kernels made for many; a batch it shares out
    over the threads, and reads [out, in] as it lies. The bits depend neither on the slabs nor on the threads.
    """
    slabs = min(SLABS, len(weight) // SLAB_ROWS)
    if slabs < 2 or not x.numel():
        return F.linear(x, weight, bias)
    size = len(weight) // slabs
    even, columns = slabs * size, x.T.expand(slabs, -1, -1)
    found = torch.bmm(weight[:even].view(slabs, size, -1), columns).flatten(0, 1)  # [even, T]
    if even < len(weight):  # fewer rows than there are slabs: with some before them, as two
        tail = torch.bmm(weight[-2 * SLAB_ROWS :].view(2, SLAB_ROWS, -1), columns[:2]).flatten(0, 1)
        found = torch.cat((found, tail[even - len(weight) :]))
    out = found.T.contiguous()
    return out if bias is None else out.add_(bias)


def packs() -> bool:
    """Whether torch has oneDNN's layout of a matrix for products of many rows, as its own compiler uses it."""
    found = torch.backends.mkldnn.is_available() and torch.backends.mkl.is_available()
    return found and all(
        hasattr(torch.ops.mkldnn, one) for one in ("_reorder_linear_weight", "_linear_pointwise")
    )


class DenseMatrix:
    """The tensors of one product, stacked by rows: [sum of rows, columns].

    In an engine for many sequences oneDNN multiplies, from a layout of its own that a product of 32 tokens reads 1.7
    times as fast. It is made with the first product, and undone where the tensors are asked for: they are held once.
    """

    def __init__(self, names: Sequence[str], rows: Sequence[int], columns: int, store: Store) -> None:
        self.names, self.rows, self.dtype, self.device = tuple(names), tuple(rows), store.dtype, store.device
        self.for_many, self.in_float32, self._store = store.for_many, store.in_float32, store
        self._dense = torch.empty((sum(rows), columns), dtype=store.dtype, device=store.device)
        self.large = self._dense.numel() >= LARGE
        self._packs = store.packed and self.large

    def parts(self) -> dict[str, Tensor]:
        """Checkpoint name -> its rows, as views."""
        if self._dense.is_mkldnn:
            self._dense = self._dense.to_dense()
        return dict(zip(self.names, self._dense.split(self.rows), strict=True))

    def product(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """[T, columns] -> [T, rows]."""
        if not self._packs or not x.numel():
            return self._store.linear(x, self._dense, bias)
        if not self._dense.is_mkldnn:
            self._dense = torch.ops.mkldnn._reorder_linear_weight(self._dense, None)
        product: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._dense, bias, "none", [], "")
        return product

    def look_up(self, ids: Tensor) -> Tensor:
        """Rows by their numbers: [T] -> [T, columns]."""
        return F.embedding(ids, self._dense)


@dataclass(slots=True)
class KeptTensor:
    """One tensor's shard in the file's own blocks, or in `Q8Tiles` of them; `blocks` is None until it is loaded."""

    name: str
    shape: tuple[int, int]
    store: Store
    blocks: Blocks | Q8Tiles | None = None

    @property
    def nbytes(self) -> int:
        if isinstance(self.blocks, Blocks):
            return self.blocks.raw.nbytes
        return 0 if self.blocks is None else self.blocks.nbytes

    def fill(self, blocks: Blocks) -> None:
        """Take the blocks that cover this rank's slice."""
        shape = (blocks.raw.shape[0], blocks.columns.size)
        if shape != self.shape:
            raise CheckpointError(
                f"{self.name}: the shard is {list(shape)}, this rank holds {list(self.shape)}"
            )
        if self.store.tiled(blocks):
            self.blocks = Q8Tiles.of(blocks)
        else:
            self.blocks = replace(blocks, raw=blocks.raw.to(self.store.device))

    def values(self, rows: slice | Tensor = slice(None)) -> Tensor:
        """All rows or some, as loading would have put them into a dense matrix."""
        if self.blocks is None:
            raise CheckpointError(f"{self.name}: no blocks were loaded")
        if isinstance(self.blocks, Q8Tiles):
            return self.blocks.values(rows)
        rules, some = self.store.rules, self.store.by_rows
        chosen = replace(self.blocks, raw=self.blocks.raw[rows]) if some else self.blocks
        found = chosen.values(partial(rules.dequantise, self.name)).to(self.store.dtype)
        return found if some else rules.stored(self.name, found)[rows]


class KeptMatrix:
    """A `DenseMatrix` whose tensors stay in blocks."""

    def __init__(self, names: Sequence[str], rows: Sequence[int], columns: int, store: Store) -> None:
        self.dtype, self.device, self._store = store.dtype, store.device, store
        self.for_many, self.in_float32 = store.for_many, store.in_float32
        self.large = sum(rows) * columns >= LARGE
        self._parts = [KeptTensor(n, (size, columns), store) for n, size in zip(names, rows, strict=True)]
        self._shape = (sum(rows), columns)

    def parts(self) -> dict[str, KeptTensor]:
        """Checkpoint name -> its blocks."""
        return {part.name: part for part in self._parts}

    def product(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """[T, columns] -> [T, rows]."""
        tiles = [part.blocks for part in self._parts if isinstance(part.blocks, Q8Tiles)]
        return self._by_tiles(tiles, x, bias) if len(tiles) == len(self._parts) else self._by_rows(x, bias)

    def _by_tiles(self, tiles: list[Q8Tiles], x: Tensor, bias: Tensor | None) -> Tensor:
        x = x.contiguous()
        out = x.new_empty(x.shape[0], self._shape[0])
        first = 0
        for part in tiles:
            part.product(x, out, first, self._store.scratch)
            first += part.rows
        return out if bias is None else out.add_(bias)

    def _by_rows(self, x: Tensor, bias: Tensor | None) -> Tensor:
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
        many: bool = False,
    ) -> None:
        self.dtype, self.device, self.rules, self.kept = dtype, device, rules, kept
        self._batch_invariant, self._many = batch_invariant, many
        #: Whether it may be computed in any order of float32, on a CPU.
        self.in_float32 = dtype == torch.float32 and device.type == "cpu" and not batch_invariant
        #: Whether it is for many sequences, whose products and attention have kernels of their own.
        self.for_many = many and self.in_float32
        #: Whether dense matrices are laid out for products of many tokens.
        self.packed = self.for_many and packs()
        #: Whether rows can be made dense one by one: what replaces `stored` may look at the whole tensor.
        self.by_rows = rules.stored is CORRECT.stored
        self._scratch = torch.empty(0, dtype=dtype, device=device)

    def wide(self) -> Store:
        """The same in float32."""
        return self._other(torch.float32, self._many)

    @cached_property
    def unpacked(self) -> Store:
        """The same for matrices that lie as the checkpoint has them: rows are looked up, or few tokens go through."""
        return self._other(self.dtype, False)

    def _other(self, dtype: torch.dtype, many: bool) -> Store:
        return Store(
            dtype, self.device, self.rules, kept=self.kept, batch_invariant=self._batch_invariant, many=many
        )

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """[T, in] -> [T, out]; `batch_invariant`: each row the same bits whatever T is."""
        if self.in_float32 and x.shape[0] <= FEW_TOKENS:
            if (out := products.product(x, weight)) is not None:
                return out if bias is None else out.add_(bias)
            if torch.backends.mkl.is_available():
                return by_slabs(x, weight, bias)
        if not self._batch_invariant:
            return F.linear(x, weight, bias)
        rows = F.pad(x, (0, 0, 0, -len(x) % SAME_ROWS)).split(SAME_ROWS)
        return torch.cat([F.linear(some, weight, bias) for some in rows])[: len(x)]

    def tiled(self, blocks: Blocks) -> bool:
        """Whether these are multiplied tile by tile: whole blocks of Q8_0, in float32, of which no rule looks at the
        bytes or at the values."""
        whole = (
            blocks.columns.start == 0
            and blocks.columns.size * blocks.type.nbytes == BLOCK * blocks.raw.shape[1]
        )
        plain = self.by_rows and self.rules.dequantise is CORRECT.dequantise
        return blocks.type.name == "Q8_0" and whole and plain and self.in_float32

    def matrix(self, names: Sequence[str], rows: Sequence[int], columns: int) -> DenseMatrix | KeptMatrix:
        """Room for the tensors of one product."""
        return (KeptMatrix if self.kept else DenseMatrix)(names, rows, columns, self)

    def vector(self, size: int) -> Tensor:
        """Room for a norm's weight."""
        return torch.empty(size, dtype=self.dtype, device=self.device)

    def number(self) -> Tensor:
        """Room for a tensor without an axis."""
        return torch.empty((), dtype=self.dtype, device=self.device)

    def bias(self, size: int) -> Tensor:
        """Room for a bias. One that is never written must read as "no bias", not as stale memory."""
        return torch.zeros(size, dtype=self.dtype, device=self.device)

    def scratch(self, shape: tuple[int, int]) -> Tensor:
        """Memory for one dense matrix, the same for all of them."""
        if self._scratch.numel() < prod(shape):
            self._scratch = torch.empty(prod(shape), dtype=self.dtype, device=self.device)
        return self._scratch[: prod(shape)].view(shape)
