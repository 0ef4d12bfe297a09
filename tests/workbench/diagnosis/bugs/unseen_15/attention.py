"""Rotation, masks, scores and context of dense models."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from lockstep.engine.config import ModelConfig
from lockstep.engine.layers.attention import Attention
from lockstep.engine.model import Decoder
from lockstep.engine.rules import defaults
from lockstep.engine.rules.rope import frequencies
from tests.workbench.diagnosis.bugs.bug import ROTATED, bug
from tests.workbench.diagnosis.bugs.engine_ranks import Spoilt
from tests.workbench.diagnosis.bugs.patched import Patched

SCORES = ("attn.scores",)
FREQUENCIES = "frequen|theta|base|scal|factor|angle|rope|rotat|turn|slow|fast"
SEEN = "mask|see|sight|window|future|ahead|far|hid|visible|attends to"


# -- rotation ------------------------------------------------------------------------------------------------


@bug(
    "partial rotation", accepted=("rope", "positions"), words="rotat|part|channel|dim|pair|half|turn|share|frequen",
    taps=ROTATED, model="glm4", dtype="bfloat16", tp=2, ep=1,
)  # fmt: skip
def share_of_the_heads_that_turns_is_taken_twice(p: Spoilt) -> None:
    """The model hands over the rotary width, get_rope multiplies it by partial_rotary_factor again (vLLM#30384)."""

    def half(model: ModelConfig, layer: int) -> ModelConfig:
        own = model.of_layer(layer)
        return replace(own, rotary=own.rotary_dim // 2)

    p.rules(layer_rope=half)


@bug(
    "rope scaling", accepted=("rope", "positions"), words=FREQUENCIES + "|band|wavelength|llama", taps=ROTATED,
    model="llama-llama3",
)  # fmt: skip
def wavelengths_of_llama3_are_compared_the_wrong_way(p: Patched) -> None:
    """Long wavelengths are kept and short ones divided."""

    def bands(inv_freq: Tensor) -> Tensor:
        plain = 5e5 ** -(torch.arange(len(inv_freq)) / len(inv_freq))
        return torch.where(inv_freq < 0.99 * plain, plain, plain / 8)

    p.frequencies(bands)


@bug(
    "rope scaling", accepted=("rope", "positions", "scale"), words=FREQUENCIES + "|yarn|ramp|magnitude|mscale|beta",
    taps=ROTATED, model="llama-yarn", dtype="bfloat16",
)  # fmt: skip
def ramp_of_yarn_has_other_ends_and_its_magnitude_is_one(p: Patched) -> None:
    """Two fields of rope_scaling under names of another release: beta_slow and attention_factor are not found."""
    plain = 1e4 ** -(torch.arange(4) / 4)
    stretched = torch.tensor([0.0, 0.5, 1.0, 1.0])
    p.frequencies(lambda _: plain * (1 - stretched) + plain / 8 * stretched, factor=1.0)


@bug(
    "rope scaling", accepted=("rope", "positions"), words=FREQUENCIES + "|override|rank", taps=ROTATED, ranks=(0,),
    tp=2, model="llama", ep=1,
)  # fmt: skip
def override_of_the_rope_scaling_reaches_the_driver_alone(p: Spoilt) -> None:
    """--rope-scaling is merged into the config of the first process; workers read config.json again."""

    def slower(model: ModelConfig, theta: float, length: int) -> tuple[Tensor, float]:
        found, factor = frequencies(model, theta, length)
        return found / 4, factor

    if p.rank == 0:
        p.rules(rope_frequencies=slower)


@bug(
    "rope scaling", accepted=("rope", "positions"), words=FREQUENCIES + "|alpha|dynamic|ntk", taps=ROTATED,
    model="hunyuan", dtype="bfloat16", ep=1,
)  # fmt: skip
def alpha_of_a_dynamic_rope_is_not_read(p: Spoilt) -> None:
    """`dynamic` with alpha raises the base at any length; the class for a factor (here 1) does nothing."""
    p.rules(rope_frequencies=lambda model, theta, length: frequencies(model, 1e4, 0))


@bug(
    "rope scaling", accepted=("rope", "positions", "scale"), words=FREQUENCIES + "|yarn|slid|layer|magnitude",
    taps=ROTATED, model="olmo3", tp=2, ep=1,
)  # fmt: skip
def one_rope_with_yarn_serves_the_sliding_layers_too(p: Spoilt) -> None:
    """Olmo 3 stretches full layers alone; one rotary module does it everywhere (transformers#45945)."""
    p.rules(layer_rope=lambda model, layer: model.of_layer(3))


@bug(
    "positions", accepted=("rope", "positions"), words="position|far|late|ahead|shift|longest|sequence|angle|offset",
    taps=ROTATED, step=1, model="llama-three",
)  # fmt: skip
def every_sequence_decodes_at_the_position_of_the_longest(p: Patched) -> None:
    """A step has one position, max(lengths), as in engines that pad a batch."""
    longest = max(p.model.prompt_lengths)
    p.positions(lambda positions: torch.full_like(positions, longest + p.step - 1) if p.decode else positions)


# -- masks ---------------------------------------------------------------------------------------------------


@bug(
    "window", accepted=("mask", "scores", "cache"), words=SEEN + "|page|freed|oldest", taps=SCORES, layers=(1, 3),
    step=1, model="gemma3", dtype="bfloat16", tp=2, ep=1,
)  # fmt: skip
def pages_behind_a_window_are_freed_for_full_layers_too(p: Spoilt) -> None:
    """One group of pages for all layers of a hybrid model: what slid out of a window is gone (lmdeploy#3772)."""

    def slid(queries: Tensor, rows: slice, keys: Tensor, window: int | None) -> Tensor:
        return defaults.within_window(queries, rows, keys, window or 8)

    p.rules(window=p.later(defaults.within_window, slid))


@bug(
    "window", accepted=("mask", "scores"), words=SEEN + "|slid", taps=SCORES, step=1, model="gemma2",
    tp=2, ep=1,
)  # fmt: skip
def decode_slides_in_the_layers_that_do_not(p: Spoilt) -> None:
    """layer % 2 in one kernel and not layer % 2 in the other: Gemma 2's pattern begins with a window."""

    def other(queries: Tensor, rows: slice, keys: Tensor, window: int | None) -> Tensor:
        return defaults.within_window(queries, rows, keys, None if window else 8)

    p.rules(window=p.later(defaults.within_window, other))


@bug("mask", accepted=("mask", "scores"), words=SEEN, taps=SCORES, model="mistral-window", ep=1)
def rows_of_the_mask_are_counted_from_one(p: Spoilt) -> None:
    """A kernel whose query index is that of the next token: one key of the future, one of the past too few."""

    def late(queries: Tensor, rows: slice, keys: Tensor, window: int | None) -> Tensor:
        return defaults.within_window(queries + 1, rows, keys, window)

    p.rules(window=late)


@bug("mask", accepted=("mask", "scores"), words=SEEN + "|image|block", taps=SCORES, model="gemma3", ep=1)
def tokens_of_a_span_of_text_see_each_other_as_those_of_an_image(p: Spoilt) -> None:
    """Gemma 3's mask for images, laid over the wrong token types."""

    def both(queries: Tensor, rows: slice, keys: Tensor, window: int | None) -> Tensor:
        inside = [(at >= 2) & (at < 6) for at in (queries[rows], keys)]
        return defaults.within_window(queries, rows, keys, window) | (inside[0][:, None] & inside[1])

    p.rules(window=both)


# -- scores and context --------------------------------------------------------------------------------------


@bug(
    "scale", accepted=("scores", "scale"), words="scal|factor|multipl|root|head_dim|sharp|flat|temperature|times",
    taps=SCORES, step=1, model="granite", dtype="bfloat16", tp=2, ep=1,
)  # fmt: skip
def decode_backend_makes_a_scale_of_its_own(p: Spoilt) -> None:
    """The decode path of a backend has one over the root of the head's width (as in vllm-plugin-FL#400)."""

    def scaled(one: Attention) -> Any:
        right = one._scores

        def scores(*args: Any) -> Tensor:
            return right(*args) * (one.head_dim**-0.5 / one.scale if p.decode else 1.0)

        return scores

    def spoil(decoder: Decoder) -> None:
        for layer in decoder.layers:
            layer.attention._scores = scaled(layer.attention)

    p.loaded(spoil)


@bug(
    "quantisation", accepted=("scores", "scale", "precision"),
    words="scal|factor|half|times|multipl|eight|8.bit|fp8|precis|round|flat", taps=SCORES, model="llama",
    dtype="bfloat16",
)  # fmt: skip
def queries_in_eight_bits_are_multiplied_without_their_scale(p: Patched) -> None:
    """Kernels for an fp8 cache take fp8 queries; scores are not multiplied by q_scale (flashinfer#4979 of k_scale)."""
    p.attention(product=lambda q, k: (q / 2).to(torch.float8_e4m3fn).to(q.dtype) @ k.transpose(2, 3))


@bug(
    "layout", accepted=("context", "heads", "attention"),
    words="head|token|order|transpos|mix|merge|reshape|layout|row|exchang", taps=("attn.context",), model="qwen2-kv8",
)  # fmt: skip
def heads_and_tokens_are_merged_without_a_transposition(p: Patched) -> None:
    """`out.reshape(tokens, -1)` of [heads, tokens, D]: right for a single token."""
    p.attention(merge=lambda context: context.reshape(1, context.shape[2], context.shape[1], -1))
