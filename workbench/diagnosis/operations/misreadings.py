"""What the tensors of a GGUF file become where a loader reads them wrongly, to be tried where it is used.

The mistakes are those that loaders make again and again; each gives a whole tensor in the checkpoint's layout.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from lockstep.engine.checkpoint.block_types import PLAIN, BlockType
from lockstep.engine.checkpoint.gguf.names import PairRows, operations
from lockstep.engine.checkpoint.gguf.source import GgufSource, decode
from lockstep.engine.config import ModelConfig

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor

    from lockstep.engine.checkpoint.dequantise.encodings import Encoding

#: Name of a mistake, and what it is in words.
Misreading = tuple[str, str]

_BLOCKS: dict[Misreading, Callable[[Encoding, Tensor, BlockType], Tensor]] = {
    ("integers", "its packed integers are used as they are, without their scales"): (
        lambda encoding, blocks, type: encoding.codes(blocks).float()
    ),
    ("swapped_nibbles", "the low and the high half of each packed byte are swapped"): (
        lambda encoding, blocks, type: decode(_nibbles_swapped(encoding, blocks), type)
    ),
    ("swapped_scales", "scale and offset of its blocks are swapped"): lambda encoding, blocks, type: (
        _scales_swapped(encoding, blocks)
    ),
}


def misreadings(
    source: GgufSource, model: ModelConfig, name: str
) -> Iterator[tuple[Misreading, NDArray[np.float32]]]:
    """The tensor `name` under each mistake that would change it."""
    blocks, right = source.blocks(name), source.read(name)
    if blocks.type.name not in PLAIN:
        yield from _of_blocks(blocks.raw, blocks.type)
    elif blocks.raw.dim() == 1:
        bytes_taken = blocks.raw[: len(right)].float()
        for operation in operations(name, model):
            bytes_taken = operation.from_gguf(bytes_taken)
        yield ("bytes", "its bytes are taken for its values"), bytes_taken.numpy()
    for operation in operations(name, model):
        stored = operation.to_gguf(right)
        yield ("rows_stored", "its rows are left in llama.cpp's order"), stored.float().numpy()
        twice = operation.to_gguf(stored)
        text = "llama.cpp's permutation is applied to its rows again, instead of undone"
        yield ("rows_again", text), twice.float().numpy()
        group = model.head_dim * model.num_kv_heads // model.num_heads
        if ".k_proj." in name and group != model.head_dim and group % 2 == 0:
            text = "its rows are put back by the number of query heads, not of KV heads"
            yield ("rows_by_query_heads", text), PairRows(group).from_gguf(stored).float().numpy()


def _of_blocks(raw: Tensor, type: BlockType) -> Iterator[tuple[Misreading, NDArray[np.float32]]]:
    # Imported here: it loads torch, which only a GGUF file's diagnosis needs.
    from lockstep.engine.checkpoint.dequantise.encodings import ENCODINGS

    blocks: Any = raw.reshape(-1, type.nbytes)
    for misreading, read in _BLOCKS.items():
        yield misreading, read(ENCODINGS[type.name], blocks, type).reshape(*raw.shape[:-1], -1).numpy()


def _nibbles_swapped(encoding: Encoding, blocks: Tensor) -> Tensor:
    swapped = blocks.clone()
    packed = swapped[:, slice(*encoding.nibbles)]
    packed.copy_(packed << 4 | packed >> 4)
    return swapped


def _scales_swapped(encoding: Encoding, blocks: Tensor) -> Tensor:
    scale, offset = encoding.scales(blocks)
    by, added = (scale, 0 * scale) if offset is None else (offset, scale)
    return by.unsqueeze(-1) * encoding.codes(blocks) + added.unsqueeze(-1)
