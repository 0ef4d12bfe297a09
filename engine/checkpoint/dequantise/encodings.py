"""How each type stores a block: where its integers are and where their scales."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from lockstep.engine.checkpoint.dequantise import iq4, k_quants, legacy, mxfp4
from lockstep.engine.checkpoint.dequantise.bits import Scales


@dataclass(frozen=True, slots=True)
class Encoding:
    """A type whose values are scale x integer + offset. The functions take blocks as uint8 [n, bytes per block].

    `codes` gives the integers (int8 or uint8, [n, groups, elements of a group]), `scales` the float32 scale of
    each group and its offset (or None), [n, groups]. `nibbles`: the bytes (start, stop) that hold the
    four low bits of two integers each.
    """

    codes: Callable[[Tensor], Tensor]
    scales: Callable[[Tensor], Scales]
    nibbles: tuple[int, int] = (0, 0)


FLOATS: dict[str, torch.dtype] = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}

ENCODINGS: dict[str, Encoding] = {
    "Q8_0": Encoding(legacy.q8_0_codes, legacy.scale),
    "Q4_0": Encoding(legacy.q4_0_codes, legacy.scale, (2, 18)),
    "Q4_1": Encoding(legacy.q4_1_codes, legacy.scale_and_offset, (4, 20)),
    "Q5_0": Encoding(legacy.q5_0_codes, legacy.scale, (6, 22)),
    "Q5_1": Encoding(legacy.q5_1_codes, legacy.scale_and_offset, (8, 24)),
    "Q2_K": Encoding(k_quants.q2_codes, k_quants.q2_scales),
    "Q3_K": Encoding(k_quants.q3_codes, k_quants.q3_scales),
    "Q4_K": Encoding(k_quants.q4_codes, k_quants.q4_scales, (16, 144)),
    "Q5_K": Encoding(k_quants.q5_codes, k_quants.q4_scales, (48, 176)),
    "Q6_K": Encoding(k_quants.q6_codes, k_quants.q6_scales, (0, 128)),
    "IQ4_NL": Encoding(iq4.nl_codes, legacy.scale, (2, 18)),
    "IQ4_XS": Encoding(iq4.xs_codes, iq4.xs_scales, (8, 136)),
    "MXFP4": Encoding(mxfp4.codes, mxfp4.scales, (1, 17)),
}

#: Every type that can be read, by ggml's name.
SUPPORTED: tuple[str, ...] = (*FLOATS, *ENCODINGS)
