"""From the bytes of a tensor to its values.

Every product of a scale and an integer below is exact in float32 (11 + 8 + 8 bits at most), so the one rounding
is that of the offset's addition, and the values equal llama.cpp's `dequantize_row_*` bit for bit, whether or not
its compiler fused multiplication and addition. Only the payload of a NaN may differ.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lockstep.engine.checkpoint.block_types import BlockType
from lockstep.engine.checkpoint.dequantise import iq4, mxfp4
from lockstep.engine.checkpoint.dequantise.encodings import ENCODINGS, FLOATS, SUPPORTED, Encoding

#: Elements at a time: few enough that intermediate results stay in the cache, enough to hide the cost of a call.
CHUNK = 1 << 20
#: Of types whose values are unevenly spaced, the largest distance between two of them.
_WIDEST = {"IQ4_NL": iq4.WIDEST_GAP, "IQ4_XS": iq4.WIDEST_GAP, "MXFP4": mxfp4.WIDEST_GAP}


def dequantise(raw: Tensor, type: BlockType) -> Tensor:
    """The float32 values of rows (or of whole blocks of them): uint8 [..., bytes] -> [..., elements].

    ValueError for a type that is not in `SUPPORTED`, or bytes that are no whole number of blocks.
    """
    if type.name not in SUPPORTED:
        raise ValueError(f"{type.name} cannot be dequantised: supported are {', '.join(SUPPORTED)}")
    if raw.shape[-1] % type.nbytes:
        raise ValueError(f"{raw.shape[-1]} bytes are no whole number of {type.name} blocks of {type.nbytes}")
    shape = (*raw.shape[:-1], raw.shape[-1] // type.nbytes * type.elements)
    if dtype := FLOATS.get(type.name):
        return _aligned(raw, type.nbytes).view(dtype).float()
    values = torch.empty(shape, device=raw.device)
    if not values.numel():
        return values
    blocks, flat = raw.reshape(-1, type.nbytes), values.view(-1, type.elements)
    count = CHUNK // type.elements
    for part, out in zip(blocks.split(count), flat.split(count), strict=True):
        _decode(_aligned(part, 2), ENCODINGS[type.name], out)
    return values


def steps(raw: Tensor, type: BlockType) -> Tensor:
    """The distance between two neighbouring values that a group can hold (of unevenly spaced ones the widest), float32:
    uint8 [..., bytes] -> [..., groups]. ValueError for a type that is not stored in blocks."""
    if type.name not in ENCODINGS:
        raise ValueError(f"{type.name} has no steps: supported are {', '.join(ENCODINGS)}")
    blocks = _aligned(raw.reshape(-1, type.nbytes), 2)
    scale, _ = ENCODINGS[type.name].scales(blocks)
    widest = _WIDEST.get(type.name, 1)
    return scale.abs().mul(widest).reshape(*raw.shape[:-1], -1)


def _decode(blocks: Tensor, encoding: Encoding, out: Tensor) -> None:
    """[n, nbytes] -> `out` [n, elements]: scale x integer + offset, group by group."""
    codes = encoding.codes(blocks)  # [n, groups, elements of a group]
    scale, offset = encoding.scales(blocks)  # [n, groups]
    values = out.view(codes.shape).copy_(codes).mul_(scale.unsqueeze(-1))
    if offset is not None:
        values.add_(offset.unsqueeze(-1))


def _aligned(raw: Tensor, size: int) -> Tensor:
    """The same bytes where they can be viewed as elements of `size` bytes."""
    return raw.clone() if raw.storage_offset() % size else raw
