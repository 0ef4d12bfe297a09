"""Attention: masks, scale, softmax, and what becomes of the context."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tests.workbench.diagnosis.bugs.bug import bug
from tests.workbench.diagnosis.bugs.patched import Patched, softmax


@bug(
    "mask",
    accepted=("mask",),
    words="mask|key|window|visib|attend|see",
    taps=("attn.scores",),
    step=1,
    model="llama",
)
def decode_begins_at_the_second_block_of_keys(p: Patched) -> None:
    def allow(allowed: Tensor) -> Tensor:
        if not p.decode:
            return allowed
        allowed = allowed.clone()
        allowed[..., :4] = False
        return allowed

    p.attention(allow=allow)


@bug(
    "mask",
    accepted=("mask",),
    words="mask|invert|causal|triang|visib|see|future",
    taps=("attn.scores",),
    layers=(1,),
    model="qwen3",
)
def true_taken_for_masked_in_one_layer(p: Patched) -> None:
    p.attention((1,), allow=lambda allowed: ~allowed)


@bug(
    "mask",
    accepted=("mask",),
    words="mask|key|length|visib|attend|see",
    taps=("attn.scores",),
    model="qwen2-tied",
)
def keys_behind_the_shortest_prompt_masked(p: Patched) -> None:
    """The mask of padding is made of the batch's smallest length. A prompt's own length ends it in decode."""

    def allow(allowed: Tensor) -> Tensor:
        shortest, own = min(p.model.prompt_lengths), p.model.prompt_lengths[p.seq]
        allowed = allowed.clone()
        allowed[..., shortest:own] = False
        return allowed

    p.attention(allow=allow)


@bug(
    "mask",
    accepted=("mask",),
    words="window|mask",
    taps=("attn.scores",),
    step=1,
    model="mistral-window",
)
def decode_counts_the_window_on_one_side_of_two(p: Patched) -> None:
    """Half of the window: the kernel of decode takes its width as left plus right."""

    def allow(allowed: Tensor) -> Tensor:
        if not p.decode:
            return allowed
        allowed = allowed.clone()
        allowed[..., : max(allowed.shape[-1] - 4, 0)] = False
        return allowed

    p.attention(allow=allow)


@bug(
    "attention",
    accepted=("scale", "scores"),
    words="scale|factor|sqrt|√|head_dim",
    taps=("attn.scores",),
    model="mistral-full",
)
def scale_of_hidden_over_heads_though_head_dim_is_given(p: Patched) -> None:
    for _, layer in p.layers():
        layer.self_attn.scaling = (64 // 8) ** -0.5


@bug(
    "attention",
    accepted=("softmax", "scale"),
    words="scale|factor|softmax|prob|sum",
    taps=("attn.probs",),
    model="llama",
)
def probabilities_divided_by_what_dropout_keeps(p: Patched) -> None:
    """Nothing is dropped, and yet they are divided by 0.9."""
    p.attention(softmax=lambda scores: softmax(scores) / 0.9)


@bug(
    "attention",
    accepted=("context", "heads", "attention"),
    words="head",
    taps=("attn.context",),
    layers=(1,),
    heads=(6,),
    step=1,
    model="llama",
)
def decode_writes_one_head_s_context_over_the_next(p: Patched) -> None:
    def context(probs: Tensor, v: Tensor) -> Tensor:
        found = probs @ v
        if p.decode:
            found[:, 6] = found[:, 5]
        return found

    p.attention((1,), context=context)


@bug(
    "attention",
    accepted=("context", "attention"),
    words="context|key|value|prob|last|row",
    taps=("attn.context",),
    model="qwen3",
)
def values_behind_the_last_whole_tile_left_out(p: Patched) -> None:
    """The softmax counts all keys; the product with the values ends at a multiple of four."""

    def context(probs: Tensor, v: Tensor) -> Tensor:
        whole = v.shape[2] // 4 * 4
        return probs[..., :whole] @ v[:, :, :whole]

    p.attention(context=context)


@bug(
    "mlp",
    accepted=("activation",),
    words="activation|silu|swish",
    taps=("mlp.act",),
    layers=(1,),
    model="llama",
)
def hard_swish_in_one_layer(p: Patched) -> None:
    p.wrap(p.mlp(1).act_fn, lambda _, x: torch.nn.functional.hardswish(x))


@bug("mlp", accepted=("activation",), words="activation|silu", taps=("mlp.act",), step=1, model="qwen2-tied")
def decode_activates_whole_vectors_alone(p: Patched) -> None:
    """The tail behind the last 64 columns keeps the gate as it is."""

    def around(forward: Any, x: Tensor) -> Tensor:
        y: Tensor = forward(x)
        return torch.cat((y[..., :64], x[..., 64:]), -1) if p.decode else y

    for _, layer in p.layers():
        p.wrap(layer.mlp.act_fn, around)
