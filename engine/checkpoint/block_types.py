"""The tensor types of a GGUF file and their sizes. Torch-free.

Source: ggml's `ggml_type` and its block structures (ggml-common.h); a test holds the table against gguf-py's.
"""

from __future__ import annotations

from typing import NamedTuple


class BlockType(NamedTuple):
    """A tensor type: a row is stored as blocks of `elements` values in `nbytes` bytes each."""

    name: str
    elements: int
    nbytes: int


#: ggml type id -> (name, elements per block, bytes per block): all that ggml knows, supported here or not.
TYPES: dict[int, BlockType] = {
    0: BlockType("F32", 1, 4),
    1: BlockType("F16", 1, 2),
    2: BlockType("Q4_0", 32, 18),
    3: BlockType("Q4_1", 32, 20),
    6: BlockType("Q5_0", 32, 22),
    7: BlockType("Q5_1", 32, 24),
    8: BlockType("Q8_0", 32, 34),
    9: BlockType("Q8_1", 32, 40),
    10: BlockType("Q2_K", 256, 84),
    11: BlockType("Q3_K", 256, 110),
    12: BlockType("Q4_K", 256, 144),
    13: BlockType("Q5_K", 256, 176),
    14: BlockType("Q6_K", 256, 210),
    15: BlockType("Q8_K", 256, 292),
    16: BlockType("IQ2_XXS", 256, 66),
    17: BlockType("IQ2_XS", 256, 74),
    18: BlockType("IQ3_XXS", 256, 98),
    19: BlockType("IQ1_S", 256, 50),
    20: BlockType("IQ4_NL", 32, 18),
    21: BlockType("IQ3_S", 256, 110),
    22: BlockType("IQ2_S", 256, 82),
    23: BlockType("IQ4_XS", 256, 136),
    24: BlockType("I8", 1, 1),
    25: BlockType("I16", 1, 2),
    26: BlockType("I32", 1, 4),
    27: BlockType("I64", 1, 8),
    28: BlockType("F64", 1, 8),
    29: BlockType("IQ1_M", 256, 56),
    30: BlockType("BF16", 1, 2),
    34: BlockType("TQ1_0", 256, 54),
    35: BlockType("TQ2_0", 256, 66),
    39: BlockType("MXFP4", 32, 17),
    40: BlockType("NVFP4", 64, 36),
    41: BlockType("Q1_0", 128, 18),
}

FLOAT32 = TYPES[0]
#: Types whose elements stand by themselves, in torch's names.
PLAIN: dict[str, str] = {
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "F64": "float64",
    "I8": "int8",
    "I16": "int16",
    "I32": "int32",
    "I64": "int64",
}
#: Types in blocks that `engine.checkpoint.dequantise` reads.
QUANTISED: tuple[str, ...] = (
    "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS",
    "MXFP4",
)  # fmt: skip


def blocks_of(name: str) -> BlockType | None:
    """The quantised type of that name; None for one whose elements stand by themselves."""
    return next((kind for kind in TYPES.values() if kind.name == name and kind.elements > 1), None)
