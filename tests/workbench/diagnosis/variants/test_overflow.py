"""Where NaN and infinities arise, and with how few bits something was computed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.workbench.diagnosis.variants.attention_run import At, Run, causes, model

INF = torch.inf


def fp16_product(x: Tensor, at: At) -> Tensor:
    """q . k rounded to float16 before it is scaled."""
    k = at.taps["k_cache"].repeat_interleave(2, 1)
    raw = torch.einsum("thd,khd->htk", at.taps["q_rope"], k)
    return (raw.half().float() / 4).masked_fill(x == -INF, -INF)


def fp16_product_and_added_mask(x: Tensor, at: At) -> Tensor:
    k = at.taps["k_cache"].repeat_interleave(2, 1)
    raw = torch.einsum("thd,khd->htk", at.taps["q_rope"], k)
    return raw.half().float() / 4 + torch.zeros_like(x).masked_fill(x == -INF, -INF)


def no_maximum(x: Tensor, at: At) -> Tensor:
    powers = at.taps["scores"].exp()
    return powers / powers.sum(-1, True)


def rounded_operands(x: Tensor, at: At) -> Tensor:
    q, k = at.taps["q_rope"].bfloat16().float(), at.taps["k_cache"].bfloat16().float()
    return (torch.einsum("thd,khd->htk", q, k.repeat_interleave(2, 1)) / 4).masked_fill(x == -INF, -INF)


def two_cells(x: Tensor, at: At) -> Tensor:
    x = x.clone()
    x[-1, 5:7] = torch.nan
    return x


def overflows_scaled_up(x: Tensor, at: At) -> Tensor:
    """The product of queries and keys that were multiplied by 128 first, in float16."""
    return ((x * 128**2 * 4).half().float() / 128**2 / 4).masked_fill(x == -INF, -INF)


def nan_behind_the_mask(x: Tensor, at: At) -> Tensor:
    """In the prefill the newest value is NaN."""
    return x * torch.nan if not at.step else x


NUMBERS: list[tuple[str, str, Any, float, str, str]] = [
    # id, tap, what is done, size of q and k, the cause's name, words of its text
    ("product", "scores", fp16_product, 200.0, "overflow_before_scale", "before it is scaled: infinite"),
    ("added", "scores", fp16_product_and_added_mask, 200.0, "overflow_before_scale", "inf - inf is NaN"),
    ("no maximum", "probs", no_maximum, 12.0, "softmax_no_maximum", "range of float32"),
    ("context beyond", "context", lambda x, at: x.half().float(), 5e4, "overflow", "beyond float16's largest"),
    ("cut off", "context", lambda x, at: x.clamp(-448, 448), 600.0, "cut_off", "float8 e4m3"),
    ("scaled up", "scores", overflows_scaled_up, 2.0, "overflow_before_scale", "times as large"),
    ("clamped", "scores", lambda x, at: x.clamp(-2, 2).masked_fill(x == -INF, -INF), 2.0, "cut_off", "at 2"),
    ("clamped above", "scores", lambda x, at: x.clamp(max=2), 2.0, "cut_off", "at 2"),
    ("clamped with the mask", "scores", lambda x, at: x.clamp(-2, 2), 2.0, "cut_off", "after the mask"),
    ("behind the mask", "context", nan_behind_the_mask, 1.0, "nan_behind_mask", "0 * NaN"),
    ("cells", "context", two_cells, 1.0, "not_finite", "although the inputs are finite"),
    ("bf16 result", "context", lambda x, at: x.bfloat16().float(), 1.0, "low_precision", "is rounded to bfloat16"),
    ("cut to bf16", "context", lambda x, at: (x.view(torch.int32) & -65536).view(torch.float32), 1.0,
     "low_precision", "is cut to bfloat16"),
    ("bf16 operands", "scores", rounded_operands, 1.0, "low_precision_input", "queries and keys are rounded"),
    ("fp16 scores", "scores", lambda x, at: x.half().float(), 1.0, "low_precision", "is rounded to float16"),
]  # fmt: skip


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("tap", "spoil", "size", "name", "words"), [one[1:] for one in NUMBERS], ids=[one[0] for one in NUMBERS]
)
def test_ranges_and_roundings_are_named(tap: str, spoil: Any, size: float, name: str, words: str) -> None:
    found = causes(Run(model(), {tap: spoil}, size=size), tap)
    assert found, "nothing named"
    reported = [(one.variant.name, one.variant.text) for one in found]
    assert any(one == name and words in text for one, text in reported[:2]), reported


def test_a_half_precision_engine_whose_scores_overflow_is_reported_of_it() -> None:
    """The reference overflows as well there, so that this is no deviation of the operation's own."""
    run = Run(model(), {"scores": fp16_product}, dtype=torch.float16, size=200.0)
    assert causes(run, "scores")[0].variant.name == "overflow_before_scale"
    assert run.site("probs").deviation is None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_right_engine_of_few_bits_is_not_accused(dtype: torch.dtype) -> None:
    run = Run(model(), dtype=dtype)
    kinds = ("k_cache", "v_cache", "scores", "probs", "context")
    assert [run.site(kind).deviation for kind in kinds] == [None] * 5
