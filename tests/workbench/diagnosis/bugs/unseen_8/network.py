"""Norms, activation, the residual stream."""

from __future__ import annotations

import torch

from tests.workbench.diagnosis.bugs.bug import bug
from tests.workbench.diagnosis.bugs.patched import Patched


@bug(
    "norm",
    accepted=("norm", "weight"),
    words="weight|one|norm",
    taps=("attn.q_norm", "attn.k_norm"),
    model="qwen3-kv4",
    dtype="bfloat16",
    tp=2,
)
def weights_of_the_head_norms_left_at_one(p: Patched) -> None:
    """Names that the loader's list does not have are skipped."""
    for i, _ in p.layers():
        p.weight(p.attn(i).q_norm, torch.ones_like)
        p.weight(p.attn(i).k_norm, torch.ones_like)


@bug(
    "norm",
    accepted=("norm", "sharding"),
    words="head|together|all|over|width|mean|rank",
    taps=("attn.q_norm",),
    model="qwen3-bias",
    tp=4,
)
def query_heads_of_each_rank_normed_together(p: Patched) -> None:
    """vllm#16311"""
    for i, _ in p.layers():
        norm = p.attn(i).q_norm

        def forward(x, norm=norm):
            mean = x.pow(2).mean((-2, -1), keepdim=True)
            return norm.weight * (x * torch.rsqrt(mean + norm.variance_epsilon))

        norm.forward = forward


@bug(
    "norm",
    accepted=("norm",),
    words="divid|root|rsqrt|multipl|variance|rms|invers|norm",
    taps=("final_norm",),
    model="llama-bias",
    tp=2,
)
def final_norm_divides_by_the_inverse_root(p: Patched) -> None:
    """llm-foundry#372"""
    norm = p.decoder.norm
    norm.forward = lambda x: (
        norm.weight * (x / torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + norm.variance_epsilon))
    )


@bug(
    "residual",
    accepted=("residual", "norm"),
    words="residual|stream|norm|overwrit|in.place",
    taps=("mlp_residual",),
    step=1,
    model="llama-mha",
)
def second_norm_of_decode_writes_into_the_stream(p: Patched) -> None:
    """nano-vllm#170: a float32 stream cast to float32 is the same tensor."""
    for i, layer in p.layers():
        norm = layer.post_attention_layernorm
        p.residuals(i, mlp=lambda stream, down, norm=norm: (norm(stream) if p.decode else stream) + down)


@bug(
    "mlp",
    accepted=("activation",),
    words="silu|activat|up|gate|swap|exchang",
    taps=("mlp.act",),
    layers=(1,),
    step=1,
    model="llama",
    dtype="bfloat16",
)
def one_layer_activates_up_in_decode(p: Patched) -> None:
    """mlx-lm#767"""
    mlp = p.mlp(1)

    def forward(x):
        gate, up = mlp.gate_proj(x), mlp.up_proj(x)
        return mlp.down_proj(mlp.act_fn(up) * gate if p.decode else mlp.act_fn(gate) * up)

    mlp.forward = forward
