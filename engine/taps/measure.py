"""Statistics and checksums of tensors, many at a time and without leaving the device.

Rows of equal length are measured together, so a decode step of a 24-layer model costs a handful of
kernels and one copy to the host instead of some for each of 480 taps.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from lockstep.engine.taps.parts import ODD

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_CHUNK = 1 << 20  # elements whose 64-bit products are alive at a time
_ODD = ODD - (1 << 64)  # as a signed 64-bit integer


def measure(rows: Tensor) -> Tensor:
    """[n, m] of any float dtype -> [n, len(PARTS)] float64, on the same device (`parts.measure` on a host's arrays).

    Minimum, maximum, sum and 2-norm are over the finite elements (inf, -inf, 0, 0 when there are none).
    """
    if rows.shape[1] == 0:  # the logits of a rank that owns none of a small vocabulary
        nothing = [math.inf, -math.inf, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0]
        return torch.tensor([nothing] * len(rows), dtype=torch.float64, device=rows.device)
    values = rows if rows.dtype in (torch.float32, torch.float64) else rows.float()
    # NaN and infinities show in the extremes. Asking for them costs a synchronisation on a GPU, so only the
    # CPU takes the short way.
    low, high = values.amin(1), values.amax(1)
    if values.device.type == "cpu" and bool((low.isfinite() & high.isfinite()).all()):
        kept, nan = values, torch.zeros(len(rows), dtype=torch.float64)
        inf, count = nan, torch.full((len(rows),), float(values.shape[1]), dtype=torch.float64)
    else:
        finite = values.isfinite()
        low = values.masked_fill(~finite, math.inf).amin(1)
        high = values.masked_fill(~finite, -math.inf).amax(1)
        kept = values.masked_fill(~finite, 0)
        nan, inf, count = values.isnan().sum(1), values.isinf().sum(1), finite.sum(1)
    total = kept.sum(1, dtype=torch.float64)
    norm = torch.linalg.vector_norm(kept, dim=1, dtype=torch.float64)
    # Comparing into floats: to sum booleans takes five times as long.
    zeros = torch.eq(values, 0, out=torch.empty_like(values)).sum(1, dtype=torch.float64)
    parts = (low, high, total, norm, nan, inf, zeros, count)
    return torch.stack([part.double() for part in parts], dim=1)


def checksum(rows: Tensor) -> Tensor:
    """[n, m] -> [n] int64: a sum over the exact bits, weighted by position, modulo 2**64.

    Equal bits in equal places give equal sums on any device and with any number of threads, because
    integer addition is exact; a permutation or one flipped bit gives another.
    """
    bits = rows.contiguous().view(_BITS[rows.element_size()])
    total = torch.zeros(rows.shape[0], dtype=torch.int64, device=rows.device)
    for start in range(0, rows.shape[1], _CHUNK):
        part = bits[:, start : start + _CHUNK].to(torch.int64)
        places = torch.arange(start, start + part.shape[1], dtype=torch.int64, device=rows.device)
        weights = (2 * places + 1) * _ODD
        # CUDA has no matrix products of integers; on the CPU they take half the time.
        total += part @ weights if rows.device.type == "cpu" else (part * weights).sum(1)
    return total


def tensor_checksum(x: Tensor) -> int:
    """Checksum of one whole tensor as an unsigned 64-bit number."""
    return int(checksum(x.reshape(1, -1))[0]) % (1 << 64)
