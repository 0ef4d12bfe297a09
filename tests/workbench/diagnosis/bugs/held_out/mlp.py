"""Held out: the activation of the MLP."""

from __future__ import annotations

import torch
from torch import nn

from tests.workbench.diagnosis.bugs.bug import bug
from tests.workbench.diagnosis.bugs.patched import Patched


def _act(p, which, change):
    """`change(gate, up)` goes into down_proj."""
    for _, layer in p.layers(which):
        mlp = layer.mlp
        mlp.forward = lambda x, mlp=mlp: mlp.down_proj(change(mlp.gate_proj(x), mlp.up_proj(x)))


silu = nn.functional.silu


@bug(
    "mlp",
    accepted=("activation",),
    words="GELU|gelu|tanh",
    taps=("mlp.act",),
    layers=(2,),
    model="qwen2-tied",
)
def gelu_by_tanh_in_one_layer(p: Patched) -> None:
    _act(p, (2,), lambda g, u: nn.functional.gelu(g, approximate="tanh") * u)


@bug(
    "mlp",
    accepted=("activation",),
    words="GELU|1\\.702|quick|sigmoid|swish",
    taps=("mlp.act",),
    model="qwen3",
)
def quick_gelu(p: Patched) -> None:
    _act(p, None, lambda g, u: g * torch.sigmoid(1.702 * g) * u)


@bug("mlp", accepted=("activation",), words="ReLU|relu", taps=("mlp.act",), layers=(1,), model="llama")
def relu_in_one_layer(p: Patched) -> None:
    _act(p, (1,), lambda g, u: g.relu() * u)


@bug(
    "mlp",
    accepted=("activation",),
    words="up|swap|exchang|gate",
    taps=("mlp.act",),
    layers=(0,),
    model="llama",
)
def up_activated_in_place_of_gate(p: Patched) -> None:
    _act(p, (0,), lambda g, u: silu(u) * g)


@bug(
    "mlp",
    accepted=("activation",),
    words="not|without|missing|linear|identity|no activation",
    taps=("mlp.act",),
    model="qwen2-tied",
)
def no_activation(p: Patched) -> None:
    _act(p, None, lambda g, u: g * u)


@bug("mlp", accepted=("activation",), words="sigmoid", taps=("mlp.act",), model="llama")
def sigmoid_in_place_of_silu(p: Patched) -> None:
    _act(p, None, lambda g, u: torch.sigmoid(g) * u)


@bug(
    "mlp",
    accepted=("activation",),
    words="product|both|after|gate|up",
    taps=("mlp.act",),
    layers=(2,),
    model="llama",
)
def silu_of_the_product(p: Patched) -> None:
    _act(p, (2,), lambda g, u: silu(g * u))


@bug("mlp", accepted=("activation",), words="twice|two|again|2", taps=("mlp.act",), model="mistral-full")
def silu_applied_twice(p: Patched) -> None:
    _act(p, None, lambda g, u: silu(silu(g)) * u)


@bug(
    "mlp",
    accepted=("activation",),
    words="GELU|gelu",
    taps=("mlp.act",),
    step=1,
    layers=(0, 1, 2),
    model="llama",
)
def gelu_in_decode(p: Patched) -> None:
    _act(p, None, lambda g, u: (nn.functional.gelu(g) if p.decode else silu(g)) * u)


@bug(
    "mlp",
    accepted=("activation", "weight", "sharding"),
    words="order|permut|interleav|pair|shift|mismatch|other",
    taps=("mlp.act",),
    layers=(1,),
    model="qwen3",
)
def gate_paired_with_another_up(p: Patched) -> None:
    _act(p, (1,), lambda g, u: silu(g) * u.roll(1, -1))


@bug(
    "mlp",
    accepted=("activation",),
    words="order|interleav|split|half|chunk|pair|gate|up|permut",
    taps=("mlp.act",),
    layers=(0, 1, 2),
    model="llama",
)
def fused_halves_split_as_pairs(p: Patched) -> None:
    def act(g, u):
        both = torch.cat([g, u], -1)
        return silu(both[..., ::2]) * both[..., 1::2]

    _act(p, None, act)


@bug(
    "mlp",
    accepted=("activation",),
    words="leaky|slope|negative|ELU|relu",
    taps=("mlp.act",),
    layers=(2,),
    model="qwen2-tied",
)
def elu_in_the_last_layer(p: Patched) -> None:
    _act(p, (2,), lambda g, u: nn.functional.elu(g) * u)


@bug(
    "mlp",
    accepted=("activation", "precision"),
    words="round|precis|float16|fp16|bf16|bfloat16|half",
    taps=("mlp.act",),
    model="llama",
)
def activation_in_half(p: Patched) -> None:
    _act(p, None, lambda g, u: (silu(g.half()) * u.half()).float())
