"""Attention of a step in which every sequence reads one token, by lengths that are on the GPU.

Nothing that the host launches depends on how long the sequences are: such a step can be captured in a CUDA graph and
replayed. Scores and probabilities lie in memory as the explicit path has them, one sequence behind the other, and
are rounded as there: taps measure them where they are. After Flash-Decoding the keys of a sequence are divided among
programs (https://pytorch.org/blog/flash-decoding), but scores and probabilities are whole, as they are to be seen.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

from lockstep.engine.batch import DecodeInputs
from lockstep.engine.layers.plain_attention import attended
from lockstep.engine.text import first_line

#: Largest error of the self-test beside float64, on outputs of about 1.
TOLERANCE = {torch.float32: 1e-4, torch.float16: 4 * 2**-11, torch.bfloat16: 4 * 2**-8}
_KEYS, _ROW = 64, 1024
#: Keys that are worth a program of their own.
_SHARE = 512
_NO_WINDOW = 1 << 30


def scores(q: Tensor, keys: Tensor, inputs: DecodeInputs, *, scale: float, window: int | None) -> Tensor:
    """q [S, heads, D], a token of each sequence, over the pool's rows `keys` [slots, kv_heads, D] -> [S, heads * most]:
    of a sequence of K keys the first heads * K are [heads, 1, K]. -inf beyond the window."""
    (count, heads, head_dim), kv_heads = q.shape, keys.shape[1]
    out = q.new_empty(count, heads * inputs.most)
    _kernels().scores[(count, kv_heads, -(-inputs.most // _KEYS))](
        q.contiguous(), keys, out, inputs.kv_lens, inputs.tables, scale, window or _NO_WINDOW, heads, kv_heads,
        head_dim, inputs.most, inputs.tables.shape[1], PAGE=inputs.page, **_tile(heads, kv_heads, head_dim),
    )  # fmt: skip
    return out


def probs(scores: Tensor, inputs: DecodeInputs, heads: int) -> Tensor:
    """Of scores their softmax, where they are: [S, heads * most]."""
    out = torch.empty_like(scores)
    _kernels().softmax[(len(scores), heads)](scores, out, inputs.kv_lens, heads, inputs.most, KEYS=_ROW)
    return out


def context(probs: Tensor, values: Tensor, inputs: DecodeInputs, heads: int, *, window: int | None) -> Tensor:
    """Probabilities [S, heads * most] over the pool's rows `values` [slots, kv_heads, D] -> [S, heads, D]. What each
    share of the keys gives is summed in order, whatever `most` is."""
    count, (_, kv_heads, head_dim) = len(probs), values.shape
    splits = -(-inputs.most // _SHARE)
    parts = probs.new_empty(count, splits, heads * head_dim, dtype=torch.float32)
    _kernels().weigh[(count, kv_heads, splits)](
        probs, values, parts, inputs.kv_lens, inputs.tables, window or _NO_WINDOW, heads, kv_heads, head_dim,
        inputs.most, inputs.tables.shape[1], splits, PAGE=inputs.page, SHARE=_SHARE, **_tile(heads, kv_heads, head_dim),
    )  # fmt: skip
    out = probs.new_empty(count, heads, head_dim)
    size = heads * head_dim
    _kernels().add_up[(count, -(-size // _ROW))](parts, out, size, splits, BLOCK=_ROW)
    return out


def _tile(heads: int, kv_heads: int, head_dim: int) -> dict[str, int]:
    """Of one KV head: the rows of its query heads, the width of a head, and keys."""
    return {"GROUP": max(16, _power(heads // kv_heads)), "WIDTH": max(16, _power(head_dim)), "KEYS": _KEYS}


def _power(size: int) -> int:
    """The next power of two."""
    return 1 << (size - 1).bit_length()


@cache
def _kernels() -> Any:
    """Triton takes a second to import, and is not there without a GPU."""
    from lockstep.engine.layers import decode_kernels

    return decode_kernels


@cache
def refusal(
    device: torch.device, dtype: torch.dtype, heads: int, kv_heads: int, head_dim: int, page: int
) -> str | None:
    """Why the kernels cannot be used with these shapes; None where they have passed their test: a ragged batch in
    shuffled blocks, with and without a window, beside float64."""
    if dtype not in TOLERANCE:
        return f"decoding by lengths on the GPU does not take {str(dtype).removeprefix('torch.')}"
    random = torch.Generator().manual_seed(0)
    lens, order = [page + 3, 1, 3 * page], torch.randperm(6, generator=random)
    tables = torch.zeros(3, 4, dtype=torch.int32)
    taken = 0
    for seq, length in enumerate(lens):
        own = -(-length // page)
        tables[seq, :own] = order[taken : taken + own]
        taken += own
    rows = (torch.randn(6 * page, kv_heads, head_dim, generator=random).to(dtype) for _ in range(2))
    keys, values = rows
    q = torch.randn(3, heads, head_dim, generator=random).to(dtype)
    inputs = DecodeInputs(torch.tensor(lens, dtype=torch.int32).to(device), tables.to(device), page, 4 * page)
    for window in (None, page + 1):
        try:
            seen = scores(q.to(device), keys.to(device), inputs, scale=head_dim**-0.5, window=window)
            found = context(probs(seen, inputs, heads), values.to(device), inputs, heads, window=window)
        except Exception as error:  # whatever a compiler or a driver throws
            return first_line("no decoding by lengths on the GPU here", error)
        for seq, length in enumerate(lens):
            at = torch.arange(max(0, length - (window or length)), length)
            slots = tables[seq, at // page].long() * page + at % page
            expected = attended(q[seq : seq + 1], keys[slots], values[slots], torch.float64)[0]
            if not (found[seq].cpu() - expected).abs().max() <= TOLERANCE[dtype]:  # NaN as well
                return "no decoding by lengths on the GPU here: the kernel is wrong on this one"
    return None
