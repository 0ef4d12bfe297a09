"""Attention in one kernel, of which nothing inside is recorded: right ones are right, wrong ones are placed at the
context and named from end to end."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from lockstep.engine.config.query_scaling import QueryScaling
from tests.workbench.diagnosis.variants.attention.test_scores import (
    MASKS,
    SCORES,
    WINDOWED,
    again,
    causal,
    masked,
    masked_by,
    rotate,
    where,
)
from tests.workbench.diagnosis.variants.attention.test_softmax import SOFTMAX
from tests.workbench.diagnosis.variants.attention_run import At, Run, Spoil, causes, model, names
from tests.workbench.diagnosis.variants.caches.test_caches import in_vectors, keep, rows_of

pytestmark = pytest.mark.sampled_file(3)

_SCORES = {one[0]: one[1:] for one in SCORES}
_MASKS = {one[0]: one[1:] for one in MASKS}
_SOFTMAX = {one[0]: one[1:] for one in SOFTMAX}

#: What is reported otherwise of a context than of the scores or probabilities themselves.
OTHERWISE = {
    "cache masked": ("cache_not_used", "not the cache"),
    "base 2": ("scores_scale", "0.69315 times the right scale"),
    "key 2 hidden": ("mask_keys_hidden", "the key at 2 is masked"),
    "values": ("cache_keys_for_values", "what is read as keys are the values"),
    "unrotated k": ("cache_unrotated", "before their rotation"),
    "unrotated q": ("scores_unrotated_queries", "before their rotation"),
    "k one behind": ("cache_rows_shifted", "each key has what stands -1 from it"),
    "newest missing": ("cache_rows_zero", "not there yet"),
    "not transposed": ("q_reread", "queries are transposed in memory"),
    "prefix of 3": ("mask_prefix_seen", "first 3 keys are seen"),
}

QUICK_SCORES = ("unscaled", "any scale", "soft cap 50", "unrotated k", "tiled", "some", "alibi", "values")
SLOW_SCORES = ("scaled twice", "by hidden", "sign", "soft cap 3.3", "unrotated q", "rotated again", "k one behind",
               "newest missing", "reversed", "all 0", "shifted", "other group", "not transposed")  # fmt: skip
QUICK_MASKS = ("none", "one ahead", "top left", "a window", "key 2 hidden", "cache masked")
SLOW_MASKS = ("strict but for the first", "blocks of 4", "chunks of 4", "prefix of 3")
QUICK_SOFTMAX = ("plus one", "sink", "bf16")
SLOW_SOFTMAX = ("over queries", "over heads", "not divided", "base 2", "twice", "before mask", "fp16 scores")


def _marked(quick: tuple[str, ...], slow: tuple[str, ...]) -> list[Any]:
    return [*quick, *(pytest.param(name, marks=pytest.mark.slow) for name in slow)]


def keep_keys(change: Spoil) -> Spoil:
    return lambda x, at: change(rows_of(at, "k_rope"), at)


def both(change: Spoil) -> dict[str, Spoil]:
    """The same done to the cached keys and values that are read, not to those that are kept."""
    return {"k_cache": keep_keys(change), "v_cache": lambda x, at: change(rows_of(at, "v_proj"), at)}


def by_first_rows(x: Tensor, count: int) -> Tensor:
    """Four bits by channel, with the scales of the first rows."""
    scale = x[:count].abs().amax(0, True) / 7
    return (x / scale).round().clamp(-8, 7) * scale


def turned_again(x: Tensor, prompt: int) -> Tensor:
    return torch.cat([rotate(x[:prompt], torch.arange(prompt), 1e4), x[prompt:]])


def in_pages(x: Tensor, table: tuple[int, ...]) -> Tensor:
    """Pages of four written by a table and read in the order of memory."""
    at = torch.arange(len(x))
    memory = x.new_zeros(4 * len(table), *x.shape[1:])
    memory[torch.tensor(table)[at // 4] * 4 + at % 4] = x
    return memory[: len(x)]


def first_of_page(x: Tensor, prompt: int) -> Tensor:
    """Decoded rows land in the first slot of their page of two."""
    x = x.clone()
    for at in range(prompt, len(x)):
        if at % 2:
            x[at - 1], x[at] = x[at].clone(), 0
    return x


def damaged(x: Tensor) -> Tensor:
    return x + 0.5 * torch.randn(x.shape, generator=torch.Generator().manual_seed(3))


def pass_of(at: At) -> Any:
    return next(one for one in at.run.passes if (one.step, one.seq) == (at.step, at.seq))


def of_small_blocks(scores: Tensor, size: int, threshold: float) -> Tensor:
    """Keys in blocks whose largest score is that far below the row's."""
    more = -scores.shape[2] % size
    blocks = torch.nn.functional.pad(scores, (0, more), value=-torch.inf).unflatten(2, (-1, size)).amax(3)
    gone = blocks < scores.amax(2, True) - threshold
    return gone.repeat_interleave(size, 2)[:, :, : scores.shape[2]]


def transposed_in_memory(x: Tensor) -> Tensor:
    """Of each head a matrix of rows, written the other way round."""
    return x.permute(1, 2, 0).reshape(x.shape[1], len(x), -1).transpose(0, 1)


def heads_first(x: Tensor) -> Tensor:
    """Rows that are written as [heads, rows, D] and read as [rows, heads, D]."""
    return x.transpose(0, 1).reshape(x.shape)


def streaming(at: At, newest: int) -> Tensor:
    """What the third head does not see that keeps the first key and the newest."""
    queries, keys = where(at)
    hidden = (queries[:, None] - keys[None, :] >= newest) & (keys[None, :] > 0)
    return hidden & (torch.arange(8) == 2)[:, None, None]


def far(at: At) -> Tensor:
    queries, keys = where(at)
    return queries[:, None] - keys[None, :] >= 4


def named(spoil: dict[str, Any], wanted: tuple[str, str], **options: Any) -> None:
    found = causes(Run(model(), spoil, fused=True, **options), "context")
    assert found, "nothing named"
    first = found[0].variant
    assert (first.name, wanted[1] in first.text) == (wanted[0], True), [one.variant.text for one in found]


@pytest.mark.slow
@pytest.mark.parametrize("which", _marked(QUICK_SCORES, SLOW_SCORES))
def test_wrong_scores_are_named_from_the_context(which: str) -> None:
    spoil, name, words = _SCORES[which]
    named({"scores": spoil}, OTHERWISE.get(which, (name, words)))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("which", _marked(QUICK_MASKS, SLOW_MASKS))
def test_wrong_masks_are_named_from_the_context(which: str) -> None:
    hidden, name, words = _MASKS[which]
    named({"scores": masked_by(hidden)}, OTHERWISE.get(which, (name, words)))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("which", _marked(QUICK_SOFTMAX, SLOW_SOFTMAX))
def test_wrong_softmaxes_are_named_from_the_context(which: str) -> None:
    spoil, name, words = _SOFTMAX[which]
    named({"probs": spoil}, OTHERWISE.get(which, (name, words)))


@pytest.mark.sampled(6)
@pytest.mark.parametrize(
    ("spoil", "name", "words"),
    [
        (
            {"k_cache": keep(lambda x, at: rows_of(at, "k_rope", layer=0)),
             "v_cache": lambda x, at: rows_of(at, "v_proj", layer=0)},
            "cache_of_another_layer", "cached keys and values: rows are those of layer 0",
        ),
        (
            {"v_cache": lambda x, at: torch.cat([rows_of(at, "v_proj", layer=0)[: at.start],
                                                 rows_of(at, "v_proj")[at.start :]])},
            "cache_of_another_layer", "rows are those of layer 0: layers share a cache, those of earlier",
        ),
        ({"v_cache": lambda x, at: rows_of(at, "k_rope")}, "cache_keys_for_values", "as values are the keys"),
        ({"v_cache": lambda x, at: rows_of(at, "v_proj").flip(1)}, "kv_heads_reversed", "KV heads in reversed order"),
        ({"v_cache": lambda x, at: rows_of(at, "v_proj").to(torch.float8_e4m3fn).float()}, "cache_low_precision",
         "the cache holds values in float8 (e4m3)"),
        (both(lambda x, at: torch.cat([x[:4].to(torch.float8_e4m3fn).float(), x[4:]]) if at.seq == 0 else x),
         "cache_low_precision", "keys and values in float8 (e4m3), the rows before 4 alone"),
        ({"k_cache": keep_keys(lambda x, at: by_first_rows(x, 4))}, "cache_low_precision", "the first 4 rows alone"),
        ({"k_cache": keep_keys(lambda x, at: in_vectors(x, 4, 8))}, "cache_layout", "by vectors of 8 dimensions"),
        ({"k_cache": keep_keys(lambda x, at: 1.6 * x), "v_cache": lambda x, at: 0.6 * rows_of(at, "v_proj")},
         "cache_scaled", "cached keys are 1.6 times what was written, and cached values 0.6 times"),
        ({"k_cache": keep_keys(lambda x, at: turned_again(x, 9) if at.step and at.seq == 0 else x)},
         "cache_rotated_again", "those of the prompt alone"),
        (both(lambda x, at: in_pages(x, (2, 0, 1)) if at.seq == 0 and not at.step else x), "cache_rows_read",
         "as by a wrong block table"),
        (both(lambda x, at: first_of_page(x, 9) if at.step and at.seq == 0 else x), "cache_rows_read",
         "of zeros, that nothing was written to"),
        (both(lambda x, at: torch.cat([damaged(x[:1]), x[1:]]) if at.seq == 0 else x), "cache_foreign_prefix",
         "holds for the first row of sequence 0"),
        ({"scores": lambda x, at: again(at.run.held["layers.0.attn.q_rope", 0][at.run.passes.index(pass_of(at))],
                                        rows_of(at, "k_rope", layer=0), at)}, "probs_of_another_layer", "of layer 0"),
        ({"scores": lambda x, at: x.masked_fill(of_small_blocks(x, 2, 0.7), -torch.inf)}, "softmax_skipped",
         "blocks of 2 keys whose largest score"),
        ({"scores": lambda x, at: again(at.taps["q_rope"], rows_of(at, "k_rope"), at, hidden=causal(at) | far(at)) * 4},
         "scores_scale", "the scale is missing; and a sliding window of 4"),
        ({"k_cache": keep_keys(lambda x, at: torch.cat([x[:9], x[9:].flip(1)]) if at.seq == 0 else x)},
         "cache_heads_moved", "cached keys: KV heads stand in reversed order, those written in decode alone"),
        (both(lambda x, at: torch.cat([x[:9], x[9:, :1].expand_as(x[9:])]) if at.seq == 0 else x),
         "cache_heads_moved", "cached keys and values: each KV head has what is the first one's, those written in"),
        ({"v_cache": lambda x, at: transposed_in_memory(rows_of(at, "v_proj")) if at.step else rows_of(at, "v_proj")},
         "cache_layout", "cached values are transposed in memory"),
        ({"scores": lambda x, at: x.masked_fill(x < x.topk(min(4, x.shape[2])).values[..., -1:], -torch.inf)},
         "probs_truncated", "only the 4 likeliest keys of each query are kept"),
        ({"scores": lambda x, at: x.masked_fill(streaming(at, 4), -torch.inf)}, "mask_first_and_newest",
         "only the first 1 key and the newest 4 are seen"),
        ({"scores": lambda x, at: torch.where(x.isfinite(), x.clamp(-0.75, 0.75), x)}, "scores_cut_off",
         "scores are cut off (clamped) at 0.75"),
        ({"v_cache": lambda x, at: rows_of(at, "v_proj") - rows_of(at, "v_proj").amin(-1, True)}, "cache_other_format",
         "cached values are written as integers with a zero point for each row and read without it"),
        ({"v_cache": lambda x, at: (4 * rows_of(at, "v_proj")).to(torch.float8_e4m3fn).float()}, "cache_codes_alone",
         "they were multiplied by 4 when they were written, and are not divided by it"),
        (both(lambda x, at: x * (torch.arange(len(x)) % 4 < 3)[:, None, None]), "cache_last_of_blocks_lost",
         "the last of each 4 keys is zero"),
        (both(lambda x, at: torch.cat([heads_first(x[:9]), x[9:]]) if at.seq == 0 else x), "cache_layout",
         "[kv head, key], those of the prompt by themselves"),
    ],
    ids=["layer 0", "values of layer 0 before", "keys", "heads of values", "float8", "float8 page",
         "channel scales", "vectors", "both scaled", "rotated again", "pages", "slots", "foreign",
         "other probabilities", "skipped", "scale and window", "heads of decoded keys",
         "first head of decoded rows", "transposed", "likeliest", "streaming", "clamped", "no zero points", "codes",
         "last of blocks", "prompt by heads"],
)  # fmt: skip
def test_wrong_caches_are_named_from_the_context(spoil: dict[str, Any], name: str, words: str) -> None:
    layers = {kind: lambda x, at, s=one: s(x, at) if at.layer == 1 else x for kind, one in spoil.items()}
    named(layers, (name, words))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("ranks", [1, 2, 8])
def test_right_attention_is_not_accused(dtype: torch.dtype, ranks: int) -> None:
    """Windowed and not, with more ranks than KV heads too, and whether scores and probabilities are rounded inside."""
    run = Run(WINDOWED, ranks=ranks, dtype=dtype, fused=True)
    for layer in range(3):
        for rank in range(ranks):
            site = run.site("context", layer, rank)
            assert (site.operation, site.deviation) == ("attention", None)


def test_exponent_and_values_in_float32_are_as_right_in_bfloat16() -> None:
    def in_one_kernel(x: Tensor, at: At) -> Tensor:
        q, k, v = (at.taps[name].float() for name in ("q_rope", "k_cache", "v_cache"))
        probs = again(q, k, at).softmax(-1)
        return torch.einsum("htk,khd->thd", probs, v.repeat_interleave(2, 1)).reshape(len(x), -1)

    run = Run(model(), {"context": in_one_kernel}, dtype=torch.bfloat16, fused=True)
    assert [run.site("context", layer).deviation for layer in range(3)] == [None] * 3


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("width", "words"), [(6, "one token too wide"), (None, "of 5 is not applied"), (3, "3 wide instead of 5")]
)
def test_windows_of_another_width_are_told_from_the_context(width: int | None, words: str) -> None:
    spoil = masked_by(lambda at: masked(*where(at), width if at.layer < 2 else None))
    (first, *_) = causes(Run(WINDOWED, {"scores": spoil}, fused=True), "context")
    assert words in first.variant.text


def test_a_mask_that_hides_all_from_most_queries_is_reported_by_those_that_see_some() -> None:
    """Decode tokens masked as if they stood at position 2: with a window of 5, all but one of six see nothing, as they
    would by any mask that hides all."""
    early = masked_by(lambda at: masked(*where(at), 5) | (where(at)[1] > 2))
    spoil = {
        "scores": lambda x, at: early(x, at) if at.step else x,
        "probs": lambda x, at: x.nan_to_num(0.0),
    }
    (first, *_) = causes(Run(model(windows=(5, 5, 5)), spoil, fused=True), "context")
    assert first.variant.text == "the first 3 keys alone are seen"


@pytest.mark.parametrize(
    ("more", "words"), [(0, "the prompt is masked"), (1, "the prompt and 1 token after it")]
)
def test_a_cache_that_begins_anew_is_told_by_what_is_masked(more: int, words: str) -> None:
    """Of prompts of several lengths no number of first keys is right for all."""

    def forgotten(at: At) -> Tensor:
        prompt = next(len(one.rows) for one in at.run.passes if one.seq == at.seq)
        return causal(at) | (where(at)[1] < prompt + more)[None, :]

    spoil = masked_by(lambda at: forgotten(at) if at.step > more else causal(at))
    (first, *_) = causes(Run(model(), {"scores": spoil}, fused=True), "context")
    assert first.variant.name == "mask_prompt_hidden"
    assert words in first.variant.text


def test_masks_that_are_numbers_are_told_from_the_context() -> None:
    for spoil, name in (
        (lambda x, at: x + causal(at).float() * -torch.inf, "mask_zero_times_inf"),
        (lambda x, at: again(at.taps["q_rope"], at.taps["k_cache"], at, hidden=causal(at) & False) - 10.0 * causal(at),
         "mask_finite"),
    ):  # fmt: skip
        assert names(Run(model(), {"scores": spoil}, fused=True), "context")[:1] == [name]


def test_one_wrong_rank_of_two_is_reported_with_its_heads() -> None:
    def spoil(x: Tensor, at: At) -> Tensor:
        x = x.clone()
        x[2] *= 4 if at.rank else 1
        return x

    run = Run(model(), {"scores": spoil}, ranks=2, fused=True)
    assert run.site("context", rank=0).deviation is None
    wrong = run.site("context", rank=1)
    assert wrong.deviation is not None
    assert wrong.deviation.heads == (2,)
    assert names(run, "context", rank=1)[0] == "scores_scale"


@pytest.mark.slow
def test_random_damage_is_not_blamed_on_anything() -> None:
    noise = torch.Generator().manual_seed(5)
    for size in (1e-3, 1.0):
        spoil = {"context": lambda x, at, s=size: x + s * torch.randn(x.shape, generator=noise)}
        run = Run(model(), spoil, fused=True)
        assert run.site("context").deviation is not None
        assert names(run, "context") == []


def test_probabilities_are_judged_from_queries_and_keys_where_no_scores_were_recorded() -> None:
    """llama.cpp shows probabilities and neither scores nor caches."""
    shown = {"scores", "k_cache", "v_cache"}
    right = Run(model(), hidden=shown)
    assert right.site("probs").operation == "weights"
    assert right.site("context").operation == "context"
    assert [right.site(kind).deviation for kind in ("probs", "context")] == [None, None]
    wrong = Run(model(), {"scores": _SCORES["unscaled"][0]}, hidden=shown)
    assert names(wrong, "probs")[0] == "scores_scale"
    tiled = Run(model(), {"scores": _SCORES["tiled"][0]}, hidden=shown)
    assert names(tiled, "probs")[0] == "kv_heads_tiled"


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("spoil", "name", "words"),
    [
        (None, "", ""),
        (
            lambda x, at: rotate(x, torch.arange(at.start, at.start + len(x)), 1e6),
            "rope_theta",
            "1e+06 instead of 10000",
        ),
        (lambda x, at: x, "rope_not_applied", "not applied"),
    ],
    ids=["right", "another base", "none"],
)
def test_rotations_inside_of_the_kernel_are_told_from_the_context(spoil: Any, name: str, words: str) -> None:
    """Neither rotated queries nor keys were recorded: they are made of the projected ones."""
    hidden = {"q_rope", "k_rope", "k_cache", "v_cache", "scores", "probs"}
    turned = {
        f"{which}_rope": lambda x, at, which=which: spoil(at.taps[f"{which}_proj"].view(len(x), -1, 16), at)
        for which in "qk"
    }
    # What is cached is what was rotated, so that keys of earlier passes are spoilt with the rest.
    run = Run(model(), {} if spoil is None else turned, hidden=hidden)
    site = run.site("context")
    assert site.operation == "attention"
    if spoil is None:
        assert site.deviation is None
        return
    (first, *_) = causes(run, "context")
    assert (first.variant.name, words in first.variant.text) == (name, True)


def test_queries_without_the_factor_of_their_position() -> None:
    """Of layers that do not rotate, and scale queries in place of that (Llama 4)."""
    scaling = QueryScaling(beta=0.5, length=4)
    unrotated = replace(model(), rotary=0, query_scaling=scaling)
    hidden = {"q_rope", "k_rope", "k_cache", "v_cache", "scores", "probs"}

    def run(scaled: bool) -> Run:
        def queries(_: Tensor, at: At) -> Tensor:
            x = at.taps["q_proj"]
            steps = (torch.arange(at.start, at.start + len(x)) / scaling.length).floor()
            factor = 1 + scaling.beta * torch.log1p(steps) if scaled else torch.ones(len(x))
            return x.view(len(x), -1, 16) * factor[:, None, None]

        keys = {"k_rope": lambda _, at: at.taps["k_proj"].view(len(at.taps["k_proj"]), -1, 16)}
        return Run(unrotated, {"q_rope": queries, **keys}, hidden=hidden)

    assert run(True).site("context").deviation is None
    found = causes(run(False), "context")[0].variant
    assert (found.name, found.kind) == ("query_scaling_missing", "query_scaling")


def _overwritten(at: At) -> Tensor:
    """Of a prompt that is read in chunks of 4: what is left in a ring of 6 slots behind each chunk."""
    queries, keys = where(at)
    written = torch.clamp((queries // 4 + 1) * 4, max=len(keys))[:, None]
    return causal(at) | (keys[None] < written - 6) if at.start == 0 else causal(at)


def test_keys_that_a_chunk_overwrites_are_named_from_the_context() -> None:
    named(
        {"scores": masked_by(_overwritten)},
        ("cache_overwritten", "chunk of 4 tokens of the prompt is written over a ring of 6"),
    )
