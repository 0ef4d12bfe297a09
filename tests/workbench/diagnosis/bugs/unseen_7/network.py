"""Norms, activation, the residual stream, precision."""

from __future__ import annotations

import torch

from tests.workbench.diagnosis.bugs.bug import QKV, bug
from tests.workbench.diagnosis.bugs.patched import Patched


def _norms(p):
    for _, layer in p.layers():
        yield from (layer.input_layernorm, layer.post_attention_layernorm)
    yield p.decoder.norm


@bug(
    "norm",
    accepted=("norm", "weight", "skipped"),
    words="norm|weight|identity|skip|without|missing",
    taps=("attn.k_norm",),
    model="qwen3",
    dtype="bfloat16",
)
def keys_never_normed(p: Patched) -> None:
    for i, _ in p.layers():
        p.attn(i).k_norm.forward = lambda x: x


@bug(
    "norm",
    accepted=("norm", "weight"),
    words="weight|other|swap|exchang|norm",
    taps=("attn_norm",),
    model="mistral-full",
    dtype="bfloat16",
)
def norms_before_attention_and_mlp_mapped_to_each_other(p: Patched) -> None:
    for _, layer in p.layers():
        one, two = layer.input_layernorm, layer.post_attention_layernorm
        one.weight, two.weight = two.weight, one.weight


@bug(
    "norm",
    accepted=("norm", "skipped"),
    words="norm|identity|skip|without|missing",
    taps=("final_norm",),
    step=1,
    model="llama-deep",
)
def final_norm_left_out_of_the_decode_graph(p: Patched) -> None:
    p.wrap(p.decoder.norm, lambda forward, x: x if p.decode else forward(x))


@bug(
    "norm",
    accepted=("norm", "weight"),
    words="weight|one|1|minus|subtract|less|offset|norm",
    taps=("attn_norm",),
    model="llama-mha",
)
def norm_weights_stored_less_one_are_used_as_they_are(p: Patched) -> None:
    """As Gemma's are, to which the code adds one."""
    for norm in _norms(p):
        p.weight(norm, lambda w: w - 1)


@bug(
    "mlp",
    accepted=("activation",),
    words="silu|activat|up|gate|swap|exchang",
    taps=("mlp.act",),
    step=1,
    model="qwen2-untied",
    dtype="bfloat16",
)
def fused_kernel_of_decode_takes_up_for_gate(p: Patched) -> None:
    for _, layer in p.layers():

        def forward(x, mlp=layer.mlp):
            gate, up = mlp.gate_proj(x), mlp.up_proj(x)
            gate, up = (up, gate) if p.decode else (gate, up)
            return mlp.down_proj(torch.nn.functional.silu(gate) * up)

        layer.mlp.forward = forward


@bug(
    "residual",
    accepted=("residual",),
    words="residual|stream|missing|lost|without|not added|dropped|never added",
    taps=("attn_residual",),
    layers=(1,),
    step=1,
    model="mistral-full",
)
def decode_drops_the_stream_before_one_mlp(p: Patched) -> None:
    p.residuals(1, attn=lambda residual, o: o if p.decode else residual + o)


@bug(
    "residual",
    accepted=("residual", "skipped"),
    words="residual|stream|missing|lost|without|not added|dropped|never|MLP|output|skip",
    taps=("mlp_residual", "final_norm"),
    layers=(2,),
    model="llama",
    dtype="bfloat16",
)
def down_of_the_last_layer_never_added(p: Patched) -> None:
    """The sum is fused into the next norm, and the final norm is called without it."""
    p.residuals(2, mlp=lambda residual, down: residual)


@bug(
    "numbers",
    accepted=("precision", "weight", "embedding"),
    words="round|precis|bfloat16|bf16|bits",
    taps=("embed",),
    model="mistral-window",
)
def weights_loaded_in_bfloat16_and_run_in_float32(p: Patched) -> None:
    for parameter in p.model.parameters():
        parameter.data = parameter.data.bfloat16().float()


@bug(
    "numbers",
    accepted=("precision", "weight", "input"),
    words="round|precis|tf32|mantissa|bits|half|float16",
    taps=QKV,
    model="qwen2-kv8",
)
def products_of_attention_in_tf32(p: Patched) -> None:
    """Both sides keep ten bits of their mantissa."""

    def short(x):
        bits = x.contiguous().view(torch.int32)
        return ((bits + 0x1000) & ~0x1FFF).view(torch.float32)

    for i, _ in p.layers():
        attn = p.attn(i)
        for side in (attn.q_proj, attn.k_proj, attn.v_proj, attn.o_proj):
            p.weight(side, short)
            p.input(side, short)
