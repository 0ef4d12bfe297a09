"""Norms, activation, the residual stream, the order of layers, precision."""

from __future__ import annotations

import torch
from torch import nn

from tests.workbench.diagnosis.bugs.bug import QKV, ROTATED, bug
from tests.workbench.diagnosis.bugs.patched import Patched


@bug(
    "norm",
    accepted=("norm", "weight"),
    words="weight|layer|other|next",
    taps=("mlp_norm",),
    layers=(0, 1),
    model="llama-bias",
)
def second_norm_has_the_weight_of_the_next_layer(p: Patched) -> None:
    """Fused with the sum before it, and counted from the wrong end."""
    following = [layer.post_attention_layernorm.weight.detach().clone() for _, layer in p.layers((1, 2))]
    for i, layer in p.layers((0, 1)):
        p.weight(layer.post_attention_layernorm, lambda w, i=i: following[i])


@bug(
    "norm",
    accepted=("norm",),
    words="norm|skip|not|token|position|row|8|identity|without",
    taps=("attn_norm",),
    model="qwen2-tied",
)
def norm_covers_the_first_eight_tokens(p: Patched) -> None:
    """The kernel's grid was captured with a smaller batch; what lies behind comes out as it went in."""
    for _, layer in p.layers():
        p.wrap(layer.input_layernorm, lambda forward, x: torch.cat([forward(x[:, :8]), x[:, 8:]], 1))


@bug(
    "norm",
    accepted=("norm", "weight"),
    words="weight|other|layer|not its",
    taps=("final_norm",),
    model="llama-mha",
    dtype="bfloat16",
)
def final_norm_has_the_weight_of_the_last_layer_s(p: Patched) -> None:
    """Both names end in `norm.weight`."""
    p.weight(p.decoder.norm, lambda w: p.decoder.layers[-1].post_attention_layernorm.weight.clone())


@bug(
    "mlp",
    accepted=("activation",),
    words="silu|activat|up|both|twice",
    taps=("mlp.act",),
    model="llama",
    dtype="bfloat16",
    tp=2,
)
def up_is_activated_as_well(p: Patched) -> None:
    """The activation runs over the whole fused output before it is split."""
    for i, _ in p.layers():
        mlp = p.mlp(i)

        def forward(x, mlp=mlp):
            return mlp.down_proj(nn.functional.silu(mlp.gate_proj(x)) * nn.functional.silu(mlp.up_proj(x)))

        mlp.forward = forward


@bug(
    "residual",
    accepted=("residual",),
    words="residual|stream|missing|lost|without|not added|dropped|never added",
    taps=("mlp_residual",),
    layers=(2,),
    model="llama-deep",
)
def second_stage_receives_the_output_without_the_stream(p: Patched) -> None:
    """With the sum fused into the next norm the first stage of a pipeline has two tensors to send; it sends one."""
    p.residuals(2, mlp=lambda residual, down: down)


@bug(
    "network",
    accepted=("weight", "norm", "layer", "layers"),
    words="layer|weight|other|same|repeat",
    taps=("attn_norm", *QKV),
    layers=(3,),
    model="llama-deep",
)
def second_stage_begins_with_the_last_layer_of_the_first(p: Patched) -> None:
    """The bounds of the stages overlap by a layer."""
    third, fourth = p.decoder.layers[2], p.decoder.layers[3]
    fourth.load_state_dict(third.state_dict())


@bug(
    "numbers",
    accepted=("precision", "rope"),
    words="round|precis|bfloat16|bf16|bits",
    taps=ROTATED,
    model="llama",
    tp=2,
)
def rotated_vectors_rounded_to_bfloat16(p: Patched) -> None:
    """The kernel's output has the dtype that it was written for."""

    def rotate(apply, q, k, cos, sin):
        return tuple(x.bfloat16().float() for x in apply(q, k, cos, sin))

    p.rotate(rotate)


@bug(
    "numbers",
    accepted=("precision", "weight", "input"),
    words="round|precis|bfloat16|bf16|bits",
    taps=("mlp.gate", "mlp.up"),
    layers=(1,),
    model="mistral-window",
)
def one_mlp_left_under_autocast(p: Patched) -> None:
    for side in (p.mlp(1).gate_proj, p.mlp(1).up_proj):

        def around(_, x, side=side):
            return (x.bfloat16() @ side.weight.bfloat16().t()).float()

        p.wrap(side, around)
