"""Held out: residuals; layers skipped or repeated."""

from __future__ import annotations

from tests.workbench.diagnosis.bugs.bug import bug
from tests.workbench.diagnosis.bugs.patched import Patched


@bug(
    "residual",
    accepted=("residual",),
    words="residual",
    taps=("mlp_residual",),
    layers=(2,),
    model="qwen2-tied",
)
def residual_missing_after_the_mlp(p: Patched) -> None:
    p.residuals(2, mlp=lambda r, o: o)


@bug(
    "residual",
    accepted=("residual", "scale"),
    words="residual|factor|scale|multipl|0\\.22",
    taps=("mlp_residual",),
    model="llama",
)
def output_multiplied_before_it_is_added(p: Patched) -> None:
    for i, _ in p.layers():
        p.residuals(i, mlp=lambda r, o: r + 0.22 * o)


@bug(
    "residual",
    accepted=("residual", "norm"),
    words="norm",
    taps=("attn_residual",),
    layers=(0, 1, 2),
    model="llama",
)
def residual_taken_after_the_norm(p: Patched) -> None:
    for i, layer in p.layers():
        p.residuals(i, attn=lambda r, o, norm=layer.input_layernorm: norm(r) + o)


@bug(
    "residual",
    accepted=("residual", "input"),
    words="residual|layer|input|before",
    taps=("mlp_residual",),
    layers=(2,),
    model="mistral-full",
)
def mlp_added_to_the_layer_s_input(p: Patched) -> None:
    layer, held = p.decoder.layers[2], {}
    p.wrap(layer.input_layernorm, lambda forward, x: held.update(x=x) or forward(x))
    p.residuals(2, mlp=lambda r, o: held["x"] + o)


@bug(
    "residual",
    accepted=("residual",),
    words="attention|o_proj|skip|missing|not added",
    taps=("attn_residual",),
    layers=(2,),
    model="llama",
)
def attention_never_added(p: Patched) -> None:
    p.residuals(2, attn=lambda r, o: r)


@bug(
    "residual",
    accepted=("residual", "sharding", "reduce"),
    words="residual|tp|times|rank|2",
    taps=("attn.o_proj", "attn_residual"),
    model="llama",
    tp=2,
)
def residual_added_on_each_rank_before_the_sum(p: Patched) -> None:
    for i, _ in p.layers():
        p.residuals(i, attn=lambda r, o: p.tp * r + o)


@bug(
    "residual",
    accepted=("residual",),
    words="residual|previous|stale|token|other",
    taps=("attn_residual",),
    layers=(1,),
    step=2,
    model="qwen3",
)
def residual_of_the_step_before(p: Patched) -> None:
    held = {}

    def add(r, o):
        old, held[p.seq] = held.get(p.seq, r), r
        return (old if p.step >= 2 else r) + o

    p.residuals(1, attn=add)


@bug(
    "residual",
    accepted=("residual", "scale"),
    words="residual|factor|scale|times",
    taps=("mlp_residual",),
    layers=(5,),
    model="llama-deep",
)
def residual_scaled_by_a_trifle(p: Patched) -> None:
    p.residuals(5, mlp=lambda r, o: r + o * (1 + 3e-5))
