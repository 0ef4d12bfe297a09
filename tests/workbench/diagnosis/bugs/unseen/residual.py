"""The residual stream: what is added to what, and how often."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tests.workbench.diagnosis.bugs.bug import bug
from tests.workbench.diagnosis.bugs.patched import Patched


def _rest(p: Patched, i: int, rest: Callable[[Any, Tensor, Tensor], Tensor]) -> None:
    """`rest(layer, hidden, o)` is all of a layer after its attention."""
    layer = p.decoder.layers[i]

    def forward(hidden_states: Tensor, **kwargs: Any) -> Tensor:
        out, _ = layer.self_attn(hidden_states=layer.input_layernorm(hidden_states), **kwargs)
        return rest(layer, hidden_states, out)

    layer.forward = forward


@bug(
    "residual",
    accepted=("residual", "norm"),
    words="residual|norm|stream",
    taps=("mlp_residual",),
    layers=(1,),
    model="llama",
)
def one_layer_keeps_the_normed_stream(p: Patched) -> None:
    def rest(layer: Any, hidden: Tensor, out: Tensor) -> Tensor:
        normed: Tensor = layer.post_attention_layernorm(hidden + out)
        return normed + layer.mlp(normed)

    _rest(p, 1, rest)


@bug(
    "residual",
    accepted=("residual",),
    words="residual|twice|stream",
    taps=("attn_residual",),
    step=1,
    model="qwen2-tied",
)
def epilogue_and_caller_both_add_the_stream_in_decode(p: Patched) -> None:
    for i, _ in p.layers():
        p.residuals(i, lambda stream, out: stream + out + stream * p.decode)


@bug(
    "residual",
    accepted=("residual", "scale"),
    words="factor|scale|multipl|times|×",
    taps=("attn_residual",),
    model="qwen3",
)
def residual_multiplier_of_another_family(p: Patched) -> None:
    for i, _ in p.layers():
        p.residuals(i, lambda stream, out: stream + 0.22 * out, lambda stream, out: stream + 0.22 * out)


@bug(
    "residual",
    accepted=("residual",),
    words="residual|stale|step|previous|stream",
    taps=("attn_residual",),
    layers=(1,),
    step=1,
    model="llama",
)
def decode_adds_to_the_stream_of_the_step_before(p: Patched) -> None:
    """The buffer of the residual was not copied into the captured graph's."""
    held: dict[int, Tensor] = {}

    def add(stream: Tensor, out: Tensor) -> Tensor:
        before = held.get(p.seq, stream)
        held[p.seq] = stream[:, -1:].clone()
        return (before if p.decode else stream) + out

    p.residuals(1, add)


@bug(
    "residual",
    accepted=("residual",),
    words="residual|attention|attn|missing|stream|lost",
    taps=("mlp_residual",),
    layers=(2,),
    model="qwen3",
)
def last_layer_adds_its_mlp_to_the_stream_before_attention(p: Patched) -> None:
    def rest(layer: Any, hidden: Tensor, out: Tensor) -> Tensor:
        return hidden + layer.mlp(layer.post_attention_layernorm(hidden + out))

    _rest(p, 2, rest)


@bug(
    "residual",
    accepted=("residual", "input", "norm"),
    words="residual|norm|input|stream|without|missing",
    taps=("attn_residual", "mlp_norm"),
    step=1,
    model="mistral-full",
)
def fused_norm_of_decode_forgets_to_add_first(p: Patched) -> None:
    def rest(layer: Any, hidden: Tensor, out: Tensor) -> Tensor:
        stream = hidden + out
        return stream + layer.mlp(layer.post_attention_layernorm(out if p.decode else stream))

    for i, _ in p.layers():
        _rest(p, i, rest)


@bug(
    "residual",
    accepted=("precision", "residual"),
    words="precision|bf16|float16|round",
    taps=("attn_residual",),
    model="llama",
)
def stream_kept_in_bfloat16(p: Patched) -> None:
    def add(stream: Tensor, out: Tensor) -> Tensor:
        return torch.add(stream, out).bfloat16().to(stream.dtype)

    for i, _ in p.layers():
        p.residuals(i, add, add)
