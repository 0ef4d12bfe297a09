"""The matrix that makes keys and values of a latent, which newer GGUF files hold as two.

`attn_k_b` [heads, latent, key] is transposed, for the form that multiplies queries by it, `attn_v_b` [heads, value,
latent] is not. Imports torch when it is read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from lockstep.engine.checkpoint.block_types import BlockType
from lockstep.engine.checkpoint.gguf.header import GgufTensor
from lockstep.engine.checkpoint.source import TensorInfo
from lockstep.engine.config import ModelConfig
from lockstep.engine.parallel.shards import Span

if TYPE_CHECKING:
    import torch

#: A file, where its tensor begins, its shape in bytes, the part that is wanted -> uint8 [*part].
Copy = Callable[[Path, int, tuple[int, ...], list[Span]], Any]


class PlacedTensor(NamedTuple):
    """A tensor of a GGUF file."""

    file: Path
    tensor: GgufTensor

    @property
    def byte_shape(self) -> tuple[int, ...]:
        """Its shape in bytes."""
        kind, shape = self.tensor.type, self.tensor.shape
        return (*shape[:-1], shape[-1] // kind.elements * kind.nbytes)


@dataclass(frozen=True, slots=True)
class SplitExpansion:
    """Both of a layer: of each head `key` rows for its key, behind them `value` for its value."""

    keys: PlacedTensor
    values: PlacedTensor

    @property
    def head_rows(self) -> int:
        """Rows of a head."""
        return self.keys.tensor.shape[2] + self.values.tensor.shape[1]

    @property
    def info(self) -> TensorInfo:
        """Of the one matrix [heads * (key + value), latent]."""
        tensors = (self.keys.tensor, self.values.tensor)
        size = sum(one.stop - one.start for one in tensors)
        heads, _, latent = self.values.tensor.shape
        kind = self.values.tensor.type.name
        return TensorInfo((heads * self.head_rows, latent), "float32", self.values.file, kind, size)

    def read(
        self, rows: Span, copy: Copy, decode: Callable[[torch.Tensor, BlockType], torch.Tensor]
    ) -> tuple[torch.Tensor, int]:
        """Those rows in float32, and the bytes that were read for them: whole heads."""
        import torch

        size = self.head_rows
        heads = Span(rows.start // size, -(-rows.stop // size))
        parts, count = list[torch.Tensor](), 0
        for one in (self.keys, self.values):
            shape = one.byte_shape
            raw = copy(one.file, one.tensor.start, shape, [heads, *(Span(0, axis) for axis in shape[1:])])
            count += raw.numel()
            parts.append(decode(raw, one.tensor.type).float())
        whole = torch.cat((parts[0].transpose(1, 2), parts[1]), 1).flatten(0, 1)
        first = rows.start - heads.start * size
        return whole[first : first + rows.size].contiguous(), count


def split_expansions(
    found: Mapping[str, PlacedTensor], model: ModelConfig
) -> dict[str, tuple[SplitExpansion, tuple[str, str]]]:
    """Parameter -> the two tensors in its place, and their names; of those that are there in their shapes."""
    expansions: dict[str, tuple[SplitExpansion, tuple[str, str]]] = {}
    if (latent := model.latent) is None:
        return expansions
    for layer in range(model.num_layers):
        names = (f"blk.{layer}.attn_k_b.weight", f"blk.{layer}.attn_v_b.weight")
        keys, values = (found.get(name) for name in names)
        if keys is None or values is None:
            continue
        shapes = (
            (model.num_heads, latent.kv_rank, latent.plain_dim),
            (model.num_heads, latent.value_dim, latent.kv_rank),
        )
        if (keys.tensor.shape, values.tensor.shape) == shapes:
            expansions[f"model.layers.{layer}.self_attn.kv_b_proj.weight"] = (
                SplitExpansion(keys, values),
                names,
            )
    return expansions
