"""The MLP: its activation, its products, its input."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from tests.workbench.diagnosis.bugs.bug import bug
from tests.workbench.diagnosis.bugs.patched import Layers, Patched

ACT = ("mlp.act",)


def _act(p: Patched, change: Callable[[Tensor, Tensor], Tensor], which: Layers = None) -> None:
    """`change(gate, up)` goes into down_proj."""
    for _, layer in p.layers(which):
        mlp = layer.mlp
        mlp.forward = lambda x, mlp=mlp: mlp.down_proj(change(mlp.gate_proj(x), mlp.up_proj(x)))


@bug("mlp", accepted=("activation",), words="product|activation|silu|gate", taps=ACT, model="qwen3")
def silu_of_the_product_of_gate_and_up(p: Patched) -> None:
    """A bracket in the wrong place."""
    _act(p, lambda gate, up: nn.functional.silu(gate * up))


@bug("mlp", accepted=("activation",), words=r"\bup\b|swap|gate", taps=ACT, step=1, model="llama")
def decode_kernel_takes_up_for_gate(p: Patched) -> None:
    silu = nn.functional.silu
    _act(p, lambda gate, up: silu(up) * gate if p.decode else silu(gate) * up)


@bug("mlp", accepted=("activation",), words="sigmoid|glu", taps=ACT, layers=(2,), model="qwen2-tied")
def plain_glu_in_one_layer(p: Patched) -> None:
    _act(p, lambda gate, up: gate.sigmoid() * up, (2,))


@bug(
    "mlp",
    accepted=("activation",),
    words="activation|swish|silu|approx|hard",
    taps=ACT,
    model="mistral-full",
)
def silu_by_straight_lines(p: Patched) -> None:
    _act(p, lambda gate, up: nn.functional.hardswish(gate) * up)


@bug(
    "mlp",
    accepted=("input",),
    words="input|norm|attn_norm|fed|called",
    taps=("mlp.gate", "mlp.up"),
    layers=(1,),
    model="qwen3",
)
def one_mlp_reads_the_norm_of_attention(p: Patched) -> None:
    held: list[Tensor] = []

    def keep(x: Tensor) -> Tensor:
        held[:] = [x]
        return x

    p.output(p.decoder.layers[1].input_layernorm, keep)
    p.input(p.mlp(1), lambda _: held[0])


@bug(
    "mlp",
    accepted=("activation",),
    words=r"\bup\b|channel|multipl|column|part",
    taps=ACT,
    model="llama",
)
def fused_product_ends_at_the_last_whole_tile(p: Patched) -> None:
    """The channels behind the 64th get their silu, but are not multiplied."""

    def change(gate: Tensor, up: Tensor) -> Tensor:
        gate = nn.functional.silu(gate)
        return torch.cat((gate[..., :64] * up[..., :64], gate[..., 64:]), -1)

    _act(p, change)
