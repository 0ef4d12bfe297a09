"""The activation of the MLP."""

from __future__ import annotations

from torch import nn

from tests.workbench.diagnosis.bugs.bug import bug
from tests.workbench.diagnosis.bugs.patched import Patched


def _act(p, which, change):
    """`change(gate, up)` goes into down_proj."""
    for _, layer in p.layers(which):
        mlp = layer.mlp
        mlp.forward = lambda x, mlp=mlp: mlp.down_proj(change(mlp.gate_proj(x), mlp.up_proj(x)))


silu = nn.functional.silu


@bug("mlp", accepted=("activation",), words="GELU|gelu", taps=("mlp.act",), model="llama")
def exact_gelu(p: Patched) -> None:
    _act(p, None, lambda g, u: nn.functional.gelu(g) * u)


@bug("mlp", accepted=("activation",), words="ReLU|relu|square", taps=("mlp.act",), model="mistral-full")
def squared_relu(p: Patched) -> None:
    _act(p, None, lambda g, u: g.relu() ** 2 * u)


@bug("mlp", accepted=("activation",), words="up|multipl|gate", taps=("mlp.act",), layers=(1,), model="qwen3")
def up_never_multiplied(p: Patched) -> None:
    _act(p, (1,), lambda g, u: silu(g))


@bug(
    "mlp",
    accepted=("activation",),
    words="\\+ ?1|1 ?\\+|one",
    taps=("mlp.act",),
    layers=(1,),
    model="qwen2-tied",
)
def one_added_to_up(p: Patched) -> None:
    _act(p, (1,), lambda g, u: silu(g) * (u + 1))


@bug("mlp", accepted=("activation",), words="clamp|clip|limit|cap", taps=("mlp.act",), model="llama")
def gate_and_up_clamped(p: Patched) -> None:
    _act(p, None, lambda g, u: silu(g.clamp(max=1.5)) * u.clamp(-1.5, 1.5))


@bug(
    "mlp",
    accepted=("activation",),
    words="GELU|gelu|rank",
    taps=("mlp.act",),
    ranks=(1,),
    model="llama",
    tp=2,
)
def gelu_on_one_rank(p: Patched) -> None:
    if p.rank == 1:
        _act(p, None, lambda g, u: nn.functional.gelu(g) * u)
