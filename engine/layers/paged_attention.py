"""Attention straight out of the paged pool: one FlashAttention call for a whole ragged batch.

`torch.nn.attention.varlen` follows block tables itself, so no row is gathered before attention. It needs a GPU,
half precision, a torch whose kernel takes pages (2.11's does not) and pages that the FlashAttention in force can
read (FlashAttention-2: multiples of 256 slots), it implements only the correct mask, and it never materialises
scores or probabilities. It is used where no tap needs those and no seam inside it is replaced; otherwise, and where
`refusal` finds the kernel unavailable or inaccurate, `engine.layers.attention` computes the same with SDPA.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor
from torch.nn.attention import current_flash_attention_impl

from lockstep.engine.batch import Batch, block_tables
from lockstep.engine.layers.plain_attention import attended
from lockstep.engine.rules import CORRECT, Rules

DEVICES = frozenset({"cuda"})
DTYPES = frozenset({torch.float16, torch.bfloat16})
#: Seams that the kernel implements itself: with any of them replaced the fault would have no effect.
SEAMS = (
    "positions", "cache_heads", "cache_reuse", "cache_values", "kv_expand", "window", "mask", "softmax", "merge"
)  # fmt: skip
#: Largest error of the self-test, on outputs of about 1: four roundings of bfloat16.
TOLERANCE = 4 * 2**-8


@dataclass(frozen=True, slots=True)
class Pages:
    """A batch of S sequences in the form that the kernel takes: all int32 on the device.

    `q_ends` [S + 1] and `kv_ends` [S + 1] are cumulative lengths, `kv_lens` [S] the cached rows, `tables`
    [S, blocks of the longest] the blocks in order, padded with 0.
    """

    q_ends: Tensor
    kv_ends: Tensor
    kv_lens: Tensor
    tables: Tensor
    most_q: int
    most_kv: int
    page_size: int

    @classmethod
    def of(cls, batch: Batch, page_size: int) -> Pages:
        """From the spans of a batch; one copy to the device a field, once a step."""
        return cls.laid_out(
            [span.stop - span.start for span in batch.spans],
            [span.kv_len for span in batch.spans],
            [span.blocks(page_size) for span in batch.spans],
            page_size,
        )

    @classmethod
    def laid_out(
        cls, q_lens: Sequence[int], kv_lens: Sequence[int], blocks: Sequence[Tensor], page_size: int
    ) -> Pages:
        """From the number of queries and of cached rows of each sequence, and its blocks in order, on the device."""
        device = blocks[0].device
        return cls(
            q_ends=_cumulative(q_lens, device),
            kv_ends=_cumulative(kv_lens, device),
            kv_lens=torch.tensor(kv_lens, dtype=torch.int32, device=device),
            tables=block_tables(blocks),
            most_q=max(q_lens),
            most_kv=max(kv_lens),
            page_size=page_size,
        )


def _cumulative(lengths: Sequence[int], device: torch.device) -> Tensor:
    ends = torch.tensor([0, *lengths], device=device).cumsum(0)
    return ends.to(torch.int32)


def attend(
    q: Tensor, keys: Tensor, values: Tensor, pages: Pages, *, scale: float, window: int | None
) -> Tensor:
    """q [T, heads, D] over the pool's rows `keys`, `values` [slots, kv_heads, D] -> [T, heads, D].

    Causality follows from lengths: the last query of a sequence sees all of its cached rows.
    """
    shape = (-1, pages.page_size, *keys.shape[1:])
    own_kernel = current_flash_attention_impl() in (None, "FA2")
    out = _kernel()(
        q.contiguous(),
        keys.view(shape),
        values.view(shape),
        pages.q_ends,
        pages.kv_ends if own_kernel else None,  # later versions take the lengths from `seqused_k` alone
        pages.most_q,
        pages.most_kv,
        scale=scale,
        window_size=(-1 if window is None else window - 1, 0),
        enable_gqa=q.shape[1] != keys.shape[1],
        seqused_k=pages.kv_lens,
        block_table=pages.tables,
        num_splits=1,  # what one sequence gets must not depend on how long the others are
    )
    assert isinstance(out, Tensor)
    return out


@cache
def _kernel() -> Callable[..., object]:
    """`torch.nn.attention.varlen.varlen_attn`. Its module loads TorchDynamo: as long as torch itself takes, and of
    use on a GPU only."""
    from torch.nn.attention.varlen import varlen_attn

    return varlen_attn


def refusal(
    rules: Rules,
    *,
    device: torch.device,
    dtype: torch.dtype,
    heads: int,
    kv_heads: int,
    head_dim: int,
    page: int,
) -> str | None:
    """Why the kernel cannot be used with these rules and shapes; None where it can and has passed its self-test."""
    if device.type not in DEVICES:
        return f"paged FlashAttention runs on a GPU, not on the {device.type}"
    if dtype not in DTYPES:
        return f"paged FlashAttention takes float16 or bfloat16, not {str(dtype).removeprefix('torch.')}"
    replaced = [seam for seam in SEAMS if getattr(rules, seam) is not getattr(CORRECT, seam)]
    if replaced:
        return f"paged FlashAttention knows only the correct {', '.join(replaced)}"
    return _self_test(device, dtype, heads, kv_heads, head_dim, page)


@cache
def _self_test(
    device: torch.device, dtype: torch.dtype, heads: int, kv_heads: int, head_dim: int, page: int
) -> str | None:
    """Run a small ragged batch from shuffled pages and compare with float32 attention.

    Which page sizes, head sizes and GPUs are supported depends on the build of torch and on the FlashAttention
    registered with it, so it is tried once per configuration.
    """
    random = torch.Generator(device).manual_seed(0)
    shapes = [(page + 3, 2), (5, 5)]  # (cached rows, queries) of two sequences
    keys, values = (
        torch.randn(4 * page, kv_heads, head_dim, generator=random, device=device).to(dtype) for _ in range(2)
    )
    blocks = [torch.tensor(taken, device=device) for taken in ([2, 0], [3, 0])]
    kv_lens, q_lens = ([shape[i] for shape in shapes] for i in range(2))
    q = torch.randn(sum(q_lens), heads, head_dim, generator=random, device=device).to(dtype)
    pages = Pages.laid_out(q_lens, kv_lens, blocks, page)
    scale = head_dim**-0.5
    try:
        found = attend(q, keys, values, pages, scale=scale, window=None).float()
    except (RuntimeError, NotImplementedError, TypeError) as error:  # TypeError: torch 2.11's takes no pages
        return f"paged FlashAttention is not to be had here: {str(error).splitlines()[0]}"
    start, worst = 0, 0.0
    for taken, (rows, queries) in zip(blocks, shapes, strict=True):
        slots = (taken[:, None] * page + torch.arange(page, device=device)).flatten()[:rows]
        own = q[start : start + queries]
        expected = attended(own, keys[slots], values[slots], torch.float32)
        worst = max(worst, (found[start : start + queries] - expected).abs().max().item())
        start += queries
    if not worst <= TOLERANCE:  # NaN as well
        return f"paged FlashAttention is off by {worst:.3g} here"
    return None
