"""Loading a GGUF file: what its blocks mean, and in which order rows lie. And matrices taken as they lie, of any file.

The functions run in the ranks and import torch when they are called.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lockstep.engine.checkpoint.block_types import PLAIN, BlockType
from lockstep.engine.checkpoint.gguf.names import PAIRED, Array, PairRows, RowOperation, operations
from lockstep.engine.config import ModelConfig
from lockstep.engine.faults.fault import Fault
from lockstep.engine.faults.needs import qkv_widths

if TYPE_CHECKING:
    from torch import Tensor

    from lockstep.engine.checkpoint.dequantise.encodings import Encoding

#: Types whose values are scale x integer + offset, and those that pack two integers' low halves into a byte. Here once
#: more because `needs` is asked where torch is not loaded.
WITH_OFFSET = frozenset({"Q4_1", "Q5_1", "Q2_K", "Q4_K", "Q5_K"})
WITH_NIBBLES = frozenset(
    {"Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS", "MXFP4"}
)


def _of_blocks(raw: Tensor, type: BlockType, read: Callable[[Encoding, Tensor], Tensor]) -> Tensor:
    """What `read(encoding, blocks [n, bytes])` makes of a quantised tensor; a plain one is read as it should be."""
    from lockstep.engine.checkpoint.dequantise.encodings import ENCODINGS
    from lockstep.engine.checkpoint.gguf.source import decode

    if type.name in PLAIN:
        return decode(raw, type)
    values = read(ENCODINGS[type.name], raw.reshape(-1, type.nbytes))
    return values.reshape(*raw.shape[:-1], -1)


def integers(name: str, raw: Tensor, type: BlockType) -> Tensor:
    """The packed integers are the weights: no scale, no offset."""
    return _of_blocks(raw, type, lambda encoding, blocks: encoding.codes(blocks).float())


def swapped_nibbles(name: str, raw: Tensor, type: BlockType) -> Tensor:
    """The low half of each byte is taken for the high one."""
    from lockstep.engine.checkpoint.gguf.source import decode

    def read(encoding: Encoding, blocks: Tensor) -> Tensor:
        swapped = blocks.clone()
        packed = swapped[:, slice(*encoding.nibbles)]
        packed.copy_(packed << 4 | packed >> 4)
        return decode(swapped, type)

    return _of_blocks(raw, type, read)


def swapped_scales(name: str, raw: Tensor, type: BlockType) -> Tensor:
    """What is added is multiplied by, and the reverse."""
    from lockstep.engine.checkpoint.gguf.source import decode

    def read(encoding: Encoding, blocks: Tensor) -> Tensor:
        scale, offset = encoding.scales(blocks)
        if offset is None:
            return decode(blocks, type)
        return offset.unsqueeze(-1) * encoding.codes(blocks) + scale.unsqueeze(-1)

    return _of_blocks(raw, type, read)


def bias_bytes(name: str, raw: Tensor, type: BlockType) -> Tensor:
    """The first bytes of a bias are its values."""
    from lockstep.engine.checkpoint.gguf.source import decode

    values = decode(raw, type)
    return raw[..., : values.shape[-1]].float() if name.endswith(".bias") else values


def as_in_the_file(name: str, model: ModelConfig) -> tuple[RowOperation, ...]:
    """Rows stay where llama.cpp's converter has put them."""
    return ()


@dataclass(frozen=True, slots=True)
class Reordered:
    """A row operation whose undoing does it once more."""

    done: RowOperation

    @property
    def rows(self) -> int:
        return self.done.rows

    def to_gguf(self, tensor: Array) -> Array:
        return self.done.to_gguf(tensor)

    def from_gguf(self, tensor: Array) -> Array:
        return self.done.to_gguf(tensor)


def reordered_again(name: str, model: ModelConfig) -> tuple[RowOperation, ...]:
    """The converter's permutation is applied to its own result, instead of the inverse."""
    return tuple(map(Reordered, operations(name, model)))


def by_query_heads(name: str, model: ModelConfig) -> tuple[RowOperation, ...]:
    """k's rows are put back as if it had as many heads as q."""
    right = operations(name, model)
    of_k = right and ".k_proj." in name
    return (PairRows(model.head_dim * model.num_kv_heads // model.num_heads),) if of_k else right


def transposed(name: str, tensor: Tensor) -> Tensor:
    """The numbers of a projection [out, in] are read as [in, out]."""
    if tensor.dim() != 2 or "_proj." not in name:
        return tensor
    return tensor.reshape(tensor.shape[::-1]).T


def _quantised(model: ModelConfig, tp: int) -> str | None:
    return None if set(model.block_types) - PLAIN.keys() else "no weight is quantised"


def _with_nibbles(model: ModelConfig, tp: int) -> str | None:
    return (
        None if WITH_NIBBLES & set(model.block_types) else "no weight is of a type that packs two in a byte"
    )


def _with_offset(model: ModelConfig, tp: int) -> str | None:
    return None if WITH_OFFSET & set(model.block_types) else "no weight is of a type with offsets"


def _biases(model: ModelConfig, tp: int) -> str | None:
    if not model.block_types:
        return "not a GGUF file"
    return None if model.qkv_bias or model.o_bias or model.mlp_bias else "the model has no biases"


def _reordered(model: ModelConfig, tp: int) -> str | None:
    there = model.block_types and model.family in PAIRED
    return None if there else "q and k lie in the model's own order (only GGUF files of llama reorder them)"


def _fewer_kv_heads(model: ModelConfig, tp: int) -> str | None:
    group = model.head_dim * model.num_kv_heads // model.num_heads
    even = model.num_kv_heads < model.num_heads and group % 2 == 0
    return _reordered(model, tp) or (
        None if even and group > 2 else "k has as many heads as q, or too few rows"
    )


def square_transposed(name: str, tensor: Tensor) -> Tensor:
    """Whether a matrix is transposed is read off its shape: square ones are mistaken."""
    square = tensor.dim() == 2 and tensor.shape[0] == tensor.shape[1]
    return tensor.T if square and "_proj." in name else tensor


def _square(model: ModelConfig, tp: int) -> str | None:
    """The shards that a rank reads."""
    square = model.hidden_size in (*qkv_widths(model, tp), -(-model.intermediate_size // tp))
    return None if square else "no matrix that a rank holds is square"


FAULTS = (
    Fault(
        id="rows-not-restored",
        seam="row_order",
        value="stored",
        correct="restored",
        title="q and k rows left in llama.cpp's order",
        group="loading",
        level="load",
        first_tap="layers.*.attn.q_proj",
        symptom="q and k are permuted within each head, v is right",
        source="vllm-project/vllm-metal#480",
        patch={"row_order": as_in_the_file},
        needs=_reordered,
    ),
    Fault(
        id="rows-reordered-again",
        seam="row_order",
        value="forward",
        correct="restored",
        title="the forward permutation of q and k used as its inverse",
        group="loading",
        level="load",
        first_tap="layers.*.attn.q_proj",
        symptom="q and k are permuted within each head, v is right",
        patch={"row_order": reordered_again},
        needs=_reordered,
    ),
    Fault(
        id="k-rows-by-query-heads",
        seam="row_order",
        value="query_heads",
        correct="restored",
        title="k rows restored by the number of query heads",
        group="loading",
        level="load",
        first_tap="layers.*.attn.k_proj",
        symptom="k alone is permuted within each head; q and v are right",
        source="huggingface/transformers#31788",
        patch={"row_order": by_query_heads},
        needs=_fewer_kv_heads,
    ),
    Fault(
        id="transposed",
        seam="stored",
        value="transposed",
        correct="unchanged",
        title="projections read as [in, out]",
        group="loading",
        level="load",
        first_tap="layers.*.attn.q_proj",
        symptom="every projection is wrong, embedding and norms are right; the numbers of the weights are all there",
        source="vllm-project/vllm#44113",
        patch={"stored": transposed},
    ),
    Fault(
        id="integers-as-weights",
        seam="dequantise",
        value="integers",
        correct="blocks",
        title="quantised weights used without scales",
        group="quantisation",
        level="load",
        first_tap="embed",
        symptom="weights are whole numbers (0 to 15, -32 to 31): far too large, and nothing like the model's",
        source="vllm-project/vllm-gguf-plugin#103",
        patch={"dequantise": integers},
        needs=_quantised,
    ),
    Fault(
        id="nibbles-swapped",
        seam="dequantise",
        value="nibble_order",
        correct="blocks",
        title="high and low nibbles swapped",
        group="quantisation",
        level="load",
        first_tap="embed",
        symptom="weights have the right size and are in the wrong places, within each block",
        source="paiml/aprender#1621",
        patch={"dequantise": swapped_nibbles},
        needs=_with_nibbles,
    ),
    Fault(
        id="scale-and-offset-swapped",
        seam="dequantise",
        value="scale_order",
        correct="blocks",
        title="scale and offset (min) of a block swapped",
        group="quantisation",
        level="load",
        first_tap="embed",
        symptom="only tensors of a type with offsets are wrong; the first of them shows it",
        source="chrishayuk/larql#24",
        patch={"dequantise": swapped_scales},
        needs=_with_offset,
    ),
    Fault(
        id="bias-bytes",
        seam="dequantise",
        value="bias_bytes",
        correct="blocks",
        title="biases not converted: their bytes are the values",
        group="quantisation",
        level="load",
        first_tap="layers.*.attn.q_proj",
        symptom="every token is off by the same vector; the biases are whole numbers from 0 to 255",
        patch={"dequantise": bias_bytes},
        needs=_biases,
    ),
    Fault(
        id="square-transposed",
        seam="stored",
        value="square_transposed",
        correct="unchanged",
        title="square projections read as [in, out]",
        group="loading",
        level="load",
        first_tap="layers.*.attn.*",
        symptom="square projections are wrong, the others are right",
        source="vllm-project/vllm#44113",
        patch={"stored": square_transposed},
        needs=_square,
    ),
)
