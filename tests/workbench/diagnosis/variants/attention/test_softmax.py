"""Wrong probabilities are named by what was done to them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.workbench.diagnosis.variants.attention_run import At, Run, causes, model, names

pytestmark = pytest.mark.sampled_file(3)

INF = torch.inf


def scores(at: At) -> Tensor:
    return at.taps["scores"]


def of_scores(f: Any) -> Any:
    return lambda x, at: f(scores(at))


def before_mask(x: Tensor, at: At) -> Tensor:
    k = at.taps["k_cache"].repeat_interleave(2, 1)
    raw = torch.einsum("thd,khd->htk", at.taps["q_rope"], k) / 4
    return raw.softmax(-1).masked_fill(scores(at) == -INF, 0)


def top(p: Tensor, k: int) -> Tensor:
    least = p.topk(min(k, p.shape[-1]), -1).values[..., -1:]
    kept = p.masked_fill(p < least, 0)
    return kept / kept.sum(-1, keepdim=True)


def bf16_softmax(x: Tensor) -> Tensor:
    return x.bfloat16().softmax(-1).float()


def straight_lines(x: Tensor, at: At) -> Tensor:
    """Between the powers of two a line."""
    power = (scores(at) - scores(at).amax(-1, True)) * 1.4426950408889634
    power = power.clamp(min=-120)
    found = power.floor().exp2() * (1 + power - power.floor())
    return found / found.sum(-1, keepdim=True)


def head_of_another(x: Tensor, at: At) -> Tensor:
    x = x.clone()
    x[5] = x[4]
    return x


def without_small(x: Tensor, size: int) -> Tensor:
    """A softmax without the blocks whose largest score is 0.6 below the row's."""
    blocks = torch.nn.functional.pad(x, (0, -x.shape[-1] % size), value=-INF).unflatten(-1, (-1, size))
    highest = blocks.amax(-1, keepdim=True)
    kept = blocks.masked_fill(highest < x.amax(-1)[..., None, None] - 0.6, -INF).flatten(-2)
    return kept[..., : x.shape[-1]].softmax(-1)


def of_layer_below(x: Tensor, at: At) -> Tensor:
    return at.run.held["layers.0.attn.probs", at.rank][-1] if at.layer == 1 else x


SOFTMAX: list[tuple[str, Any, str, str]] = [
    (
        "small blocks left out",
        of_scores(lambda x: without_small(x, 4)),
        "softmax_skipped",
        "blocks of 4 keys whose largest score",
    ),
    ("small keys left out", of_scores(lambda x: without_small(x, 1)), "softmax_skipped", "keys whose score"),
    ("of the layer below", of_layer_below, "result_of_layer", "those of layer 0"),
    ("over queries", of_scores(lambda x: x.softmax(1)), "softmax_over_queries", "over the queries"),
    ("over heads", of_scores(lambda x: x.softmax(0).nan_to_num(0)), "softmax_over_heads", "over the heads"),
    (
        "over heads, under a mask that is finite",
        of_scores(lambda x: x.clamp(min=torch.finfo(torch.float32).min).softmax(0)),
        "softmax_over_heads",
        "large negative number",
    ),
    (
        "not divided",
        of_scores(lambda x: (x - x.amax(-1, True)).exp()),
        "softmax_not_normalised",
        "not divided",
    ),
    ("squared", of_scores(lambda x: x.softmax(-1) ** 2), "softmax_squared", "squared"),
    ("sigmoid", of_scores(torch.sigmoid), "softmax_sigmoid", "sigmoid of each score"),
    ("exp only", of_scores(lambda x: x.exp()), "softmax_not_normalised", "maximum not subtracted"),
    (
        "base 2",
        of_scores(lambda x: torch.exp2(x) / torch.exp2(x).sum(-1, True)),
        "softmax_base_2",
        "powers of 2",
    ),
    ("temperature", of_scores(lambda x: (x / 0.7).softmax(-1)), "softmax_temperature", "temperature of 0.7"),
    (
        "plus one",
        of_scores(lambda x: x.exp() / (1 + x.exp().sum(-1, True))),
        "softmax_plus_one",
        "attend to nothing",
    ),
    (
        "plus one after max",
        of_scores(lambda x: (x - x.amax(-1, True)).exp() / (1 + (x - x.amax(-1, True)).exp().sum(-1, True))),
        "softmax_plus_one",
        "after the maximum",
    ),
    (
        "sink",
        of_scores(
            lambda x: torch.cat([x, torch.arange(8.0)[:, None, None].expand(-1, x.shape[1], 1)], -1).softmax(
                -1
            )[..., :-1]
        ),
        "softmax_sink",
        "attention sink",
    ),
    ("before mask", before_mask, "softmax_before_mask", "before the mask"),
    (
        "twice",
        of_scores(lambda x: x.softmax(-1).masked_fill(x == -INF, -INF).softmax(-1)),
        "softmax_twice",
        "twice",
    ),
    (
        "uniform",
        of_scores(lambda x: x.masked_fill(x != -INF, 0).softmax(-1)),
        "probs_uniform",
        "same probability",
    ),
    ("hard", lambda x, at: (x == x.amax(-1, True)).float(), "softmax_hard", "argmax"),
    ("top 3", lambda x, at: top(x, 3), "probs_truncated", "3 likeliest"),
    ("below 0.05", lambda x, at: x.masked_fill(x < 0.05, 0), "probs_truncated", "does not add up"),
    ("scaled", lambda x, at: x * 0.9, "probs_scaled", "0.9 instead of 1"),
    ("dropout", lambda x, at: torch.nn.functional.dropout(x, 0.3), "dropout", "rate 0.3"),
    ("bf16", of_scores(bf16_softmax), "softmax_low_precision", "bfloat16"),
    ("lines", straight_lines, "softmax_other_function", "instead of"),
    ("a head", head_of_another, "softmax_heads_moved", "head 5 has those of head 4"),
    (
        "fp16 scores",
        of_scores(lambda x: x.half().float().softmax(-1)),
        "softmax_low_precision",
        "rounded to float16",
    ),
]


@pytest.mark.parametrize(
    ("spoil", "name", "words"), [one[1:] for one in SOFTMAX], ids=[one[0] for one in SOFTMAX]
)
def test_wrong_softmaxes_are_named(spoil: Any, name: str, words: str) -> None:
    torch.manual_seed(3)
    found = causes(Run(model(), {"probs": spoil}), "probs")
    assert found, "nothing named"
    assert (found[0].variant.name, words in found[0].variant.text) == (name, True), [
        one.variant.text for one in found
    ]


def test_one_head_in_decode_with_another_temperature() -> None:
    def spoil(x: Tensor, at: At) -> Tensor:
        x = x.clone()
        if at.step:
            x[3] = (2 * scores(at)[3]).softmax(-1)
        return x

    run = Run(model(), {"probs": spoil})
    deviation = run.site("probs").deviation
    assert deviation is not None
    assert (deviation.heads, deviation.steps) == ((3,), (1, 2, 3))
    assert names(run, "probs")[0] in ("softmax_temperature", "softmax_squared")  # of exponentials that is one


def test_random_damage_to_probabilities_is_not_blamed_on_anything() -> None:
    noise = torch.Generator().manual_seed(5)
    for size in (1e-4, 1e-2):
        run = Run(model(), {"probs": lambda x, at, s=size: x + s * torch.randn(x.shape, generator=noise)})
        assert run.site("probs").deviation is not None
        assert names(run, "probs") == []


def test_large_scores_with_a_right_softmax_are_not_accused() -> None:
    assert Run(model(), size=12.0).site("probs").deviation is None
