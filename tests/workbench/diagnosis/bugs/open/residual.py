"""Residuals; layers skipped or repeated."""

from __future__ import annotations

from tests.workbench.diagnosis.bugs.bug import bug
from tests.workbench.diagnosis.bugs.patched import Patched


@bug(
    "residual", accepted=("residual",), words="residual", taps=("attn_residual",), layers=(1,), model="llama"
)
def residual_missing_after_attention(p: Patched) -> None:
    p.residuals(1, attn=lambda r, o: o)


@bug("residual", accepted=("residual",), words="residual|twice|2", taps=("attn_residual",), model="qwen3")
def residual_added_twice(p: Patched) -> None:
    for i, _ in p.layers():
        p.residuals(i, attn=lambda r, o: 2 * r + o)


@bug(
    "residual",
    accepted=("residual", "norm"),
    words="norm",
    taps=("mlp_residual",),
    layers=(1,),
    model="qwen3",
)
def residual_overwritten_by_the_norm(p: Patched) -> None:
    layer = p.decoder.layers[1]
    p.residuals(1, mlp=lambda r, o: layer.post_attention_layernorm(r) + o)


@bug(
    "residual",
    accepted=("residual", "input", "norm"),
    words="parallel|residual|input|before",
    taps=("mlp_norm",),
    layers=(0, 1, 2),
    model="llama",
)
def attention_and_mlp_side_by_side(p: Patched) -> None:
    for _, layer in p.layers():
        held = {}
        p.wrap(layer.input_layernorm, lambda norm, x, held=held: held.update(x=x) or norm(x))
        p.wrap(layer.post_attention_layernorm, lambda norm, x, held=held: norm(held["x"]))


@bug(
    "residual",
    accepted=("residual", "layer", "layers", "skipped"),
    words="skip|layer|input|unchanged|never ran",
    taps=("attn_norm", "mlp_residual"),
    layers=(1,),
    model="llama",
)
def a_layer_skipped(p: Patched) -> None:
    p.decoder.layers[1].forward = lambda hidden_states, **kwargs: hidden_states


@bug(
    "residual",
    accepted=("residual",),
    words="mlp|residual|skip|missing|not added",
    taps=("mlp_residual",),
    layers=(1,),
    step=1,
    model="qwen2-tied",
)
def mlp_left_out_in_decode(p: Patched) -> None:
    p.residuals(1, mlp=lambda r, o: r if p.decode else r + o)


@bug(
    "residual",
    accepted=("residual", "sharding"),
    words="rank|residual",
    taps=("mlp_residual",),
    layers=(0,),
    ranks=(1,),
    model="qwen2-tied",
    tp=2,
)
def residual_missing_on_one_rank(p: Patched) -> None:
    if p.rank == 1:
        p.residuals(0, mlp=lambda r, o: o)
