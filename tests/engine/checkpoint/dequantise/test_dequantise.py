"""Dequantisation, bit for bit against gguf-py and llama.cpp's own `dequantize_row_*`."""

from __future__ import annotations

import ctypes
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

from lockstep.engine.checkpoint.block_types import TYPES, BlockType
from lockstep.engine.checkpoint.dequantise import SUPPORTED, dequantise
from lockstep.engine.checkpoint.dequantise.encodings import ENCODINGS

BY_NAME = {type.name: type for type in TYPES.values()}
IDS = {type.name: number for number, type in TYPES.items()}

#: Where the float16 numbers of a block are.
HALVES = {
    "Q4_1": (0, 2),
    "Q5_1": (0, 2),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
} | {"Q6_K": (208,)}
EXTREMES = {
    "zero": 0x0000,
    "minus zero": 0x8000,
    "largest": 0x7BFF,
    "most negative": 0xFBFF,
    "smallest subnormal": 0x0001,
    "largest subnormal": 0x83FF,
    "infinite": 0x7C00,
    "minus infinite": 0xFC00,
    "NaN": 0x7E00,
}


def random_blocks(type: BlockType, count: int = 500) -> torch.Tensor:
    """Any bytes at all: the scales among them are also NaN, infinite and subnormal."""
    return torch.randint(
        0, 256, (4, count * type.nbytes), dtype=torch.uint8, generator=torch.Generator().manual_seed(0)
    )


def extreme_blocks(type: BlockType) -> torch.Tensor:
    """Blocks of all zeros, all ones, and random ones with each extreme scale (and each pair, where there are two)."""
    count = 2 + len(EXTREMES) ** 2
    blocks = random_blocks(type, count)[0].view(count, type.nbytes)
    blocks[0], blocks[1] = 0, 255
    if type.nbytes % 2:  # its scale is an exponent alone
        blocks[2:, 0] = torch.tensor([0, 1, 2, 127, 128, 254, 255], dtype=torch.uint8).repeat(count)[
            : count - 2
        ]
        return blocks.view(1, -1)
    halves = blocks.view(torch.int16)
    scales = torch.tensor(list(EXTREMES.values())).to(torch.int16)
    for index, pair in enumerate(torch.cartesian_prod(scales, scales), 2):
        for at, value in zip(HALVES.get(type.name, (0,)), pair, strict=False):
            halves[index, at // 2] = value
    return blocks.view(1, -1)


def ours(raw: torch.Tensor, type: BlockType) -> np.ndarray:
    return dequantise(raw, type).numpy()


def gguf_py(raw: torch.Tensor, type: BlockType) -> np.ndarray:
    with np.errstate(all="ignore"):
        return gguf.dequantize(raw.numpy(), gguf.GGMLQuantizationType[type.name])


class TypeTraits(ctypes.Structure):
    """The head of ggml's `ggml_type_traits`."""

    _fields_ = (
        ("type_name", ctypes.c_char_p),
        ("blck_size", ctypes.c_int64),
        ("blck_size_interleave", ctypes.c_int64),
        ("type_size", ctypes.c_size_t),
        ("is_quantized", ctypes.c_bool),
        ("to_float", ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64)),
    )


@pytest.fixture(scope="module")
def ggml() -> ctypes.CDLL:
    """llama.cpp's ggml library."""
    llama_cpp = pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")
    library = ctypes.CDLL(str(Path(llama_cpp.__file__).parent / "lib" / "libggml-base.so"))
    library.ggml_get_type_traits.restype = ctypes.POINTER(TypeTraits)
    return library


def llama_cpp(ggml: ctypes.CDLL, raw: torch.Tensor, type: BlockType) -> np.ndarray:
    traits = ggml.ggml_get_type_traits(IDS[type.name]).contents
    values = np.empty((raw.shape[0], raw.shape[1] // type.nbytes * type.elements), np.float32)
    if type.name == "F32":  # ggml has no conversion of what is float32 already
        return raw.numpy().view(np.float32)
    traits.to_float(raw.data_ptr(), values.ctypes.data, values.size)
    return values


def assert_same_bits(found: np.ndarray, expected: np.ndarray) -> None:
    """Equal to the last bit (the sign of zeros too), NaN where NaN is: its payload is nobody's promise."""
    assert found.shape == expected.shape
    assert found.dtype == expected.dtype
    nan = np.isnan(expected)
    np.testing.assert_array_equal(np.isnan(found), nan)
    np.testing.assert_array_equal(found[~nan].view(np.uint32), expected[~nan].view(np.uint32))


@pytest.mark.parametrize("name", SUPPORTED)
@pytest.mark.parametrize("blocks", [random_blocks, extreme_blocks])
def test_gguf_py_agrees(name, blocks):
    raw = blocks(BY_NAME[name])
    assert_same_bits(ours(raw, BY_NAME[name]), gguf_py(raw, BY_NAME[name]))


@pytest.mark.llamacpp
@pytest.mark.parametrize("name", SUPPORTED)
@pytest.mark.parametrize("blocks", [random_blocks, extreme_blocks])
def test_llama_cpp_agrees(ggml, name, blocks):
    raw = blocks(BY_NAME[name])
    assert_same_bits(ours(raw, BY_NAME[name]), llama_cpp(ggml, raw, BY_NAME[name]))


@pytest.mark.parametrize("name", SUPPORTED)
def test_values_do_not_depend_on_what_is_beside_them(name):
    """More blocks than are decoded at a time, an odd address, and single blocks: all give the same."""
    type = BY_NAME[name]
    raw = random_blocks(type, (1 << 20) // type.elements + 3)[:1]
    whole = ours(raw, type)
    odd = torch.cat((torch.zeros(1, dtype=torch.uint8), raw[0]))[1:]
    assert_same_bits(ours(odd, type), whole[0])
    last = raw[:, -type.nbytes :]
    assert_same_bits(ours(last, type), whole[:, -type.elements :])


@pytest.mark.parametrize("name", [name for name in ENCODINGS if ENCODINGS[name].nibbles[1]])
def test_the_nibbles_are_where_the_table_states(name):
    """Swapping the halves of those bytes reorders the integers' low bits and nothing else of the block."""
    type, encoding = BY_NAME[name], ENCODINGS[name]
    raw = random_blocks(type)[0].view(-1, type.nbytes)
    swapped = raw.clone()
    part = swapped[:, slice(*encoding.nibbles)]
    part.copy_(part << 4 | part >> 4)
    assert not torch.equal(encoding.codes(raw), encoding.codes(swapped))
    for before, after in zip(encoding.scales(raw), encoding.scales(swapped), strict=True):
        assert (before is None and after is None) or torch.equal(before.nan_to_num(), after.nan_to_num())


def test_no_rows_and_no_blocks():
    assert dequantise(torch.empty((3, 0), dtype=torch.uint8), BY_NAME["Q4_K"]).shape == (3, 0)
    assert dequantise(torch.empty((0, 144), dtype=torch.uint8), BY_NAME["Q4_K"]).shape == (0, 256)


def test_unsupported_types_and_broken_rows_are_refused():
    with pytest.raises(ValueError, match="IQ1_S cannot be dequantised: supported are F32, F16"):
        dequantise(torch.zeros(50, dtype=torch.uint8), BY_NAME["IQ1_S"])
    with pytest.raises(ValueError, match="145 bytes are no whole number of Q4_K blocks of 144"):
        dequantise(torch.zeros(145, dtype=torch.uint8), BY_NAME["Q4_K"])
