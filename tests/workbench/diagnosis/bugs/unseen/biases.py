"""Biases: lost, moved, added in another place or another number of times."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tests.workbench.diagnosis.bugs.bug import QKV, bug
from tests.workbench.diagnosis.bugs.patched import Patched


@bug(
    "bias",
    accepted=("bias", "sharding"),
    words="bias",
    taps=("attn.q_proj", "attn.k_proj"),
    model="qwen2-tied",
)
def fused_bias_joined_in_another_order_than_its_weight(p: Patched) -> None:
    for _, layer in p.layers():
        attn = layer.self_attn
        pack = torch.cat((attn.k_proj.bias, attn.q_proj.bias))
        p.bias(attn.q_proj, lambda bias, pack=pack: pack[: len(bias)])
        p.bias(attn.k_proj, lambda bias, pack=pack: pack[-len(bias) :])


@bug(
    "bias",
    accepted=("bias",),
    words="bias",
    taps=("attn.k_proj", "attn.k_rope"),
    model="qwen2-tied",
)
def k_bias_added_after_the_rotation(p: Patched) -> None:
    for i, layer in p.layers():
        attn = layer.self_attn
        bias = attn.k_proj.bias.detach().clone().view(1, -1, 1, attn.head_dim)
        p.bias(attn.k_proj, torch.zeros_like)

        def late(apply, q, k, cos, sin, bias=bias):
            q, k = apply(q, k, cos, sin)
            return q, k + bias

        p.rotate(late, (i,))


@bug(
    "bias",
    accepted=("bias",),
    words="bias",
    taps=("attn.o_proj",),
    model="llama-bias",
    tp=2,
)
def o_bias_shared_among_the_ranks_but_added_by_one(p: Patched) -> None:
    """Divided by the number of ranks for a sum in which rank 0 alone brings it."""
    for _, layer in p.layers():
        p.bias(layer.self_attn.o_proj, lambda bias: bias / p.tp)


@bug(
    "bias",
    accepted=("bias",),
    words="bias",
    taps=("attn.q_proj", "attn.k_proj"),
    model="llama-bias",
)
def bias_left_in_llama_cpp_order(p: Patched) -> None:
    """The rows of the weights were put back, those of the biases were not."""

    def order(bias: Tensor) -> Tensor:
        return bias.view(-1, 2, 4).transpose(1, 2).flatten()

    for _, layer in p.layers():
        p.bias(layer.self_attn.q_proj, order)
        p.bias(layer.self_attn.k_proj, order)


@bug(
    "bias",
    accepted=("bias",),
    words="bias",
    taps=("attn.v_proj",),
    ranks=(1,),
    model="qwen2-tied",
    tp=2,
)
def v_bias_loaded_by_the_first_rank_only(p: Patched) -> None:
    if p.rank == 1:
        for _, layer in p.layers():
            p.bias(layer.self_attn.v_proj, torch.zeros_like)


@bug("bias", accepted=("bias",), words="bias", taps=QKV, step=1, model="qwen2-untied")
def matrix_vector_kernel_knows_no_bias(p: Patched) -> None:
    """One token takes a path of its own."""
    for _, layer in p.layers():
        attn = layer.self_attn
        for module in (attn.q_proj, attn.k_proj, attn.v_proj):
            p.wrap(
                module,
                lambda forward, x, module=module: (
                    nn.functional.linear(x, module.weight) if x.shape[1] == 1 else forward(x)
                ),
            )


@bug("bias", accepted=("bias",), words="bias", taps=("mlp.gate",), layers=(1,), model="llama-bias")
def gate_bias_of_one_layer_not_in_the_index(p: Patched) -> None:
    p.bias(p.mlp(1).gate_proj, torch.zeros_like)


@bug("bias", accepted=("bias",), words="bias", taps=("attn.q_proj",), heads=(7,), model="qwen3-bias")
def loop_over_q_bias_ends_one_head_early(p: Patched) -> None:
    def cut(bias: Tensor) -> Tensor:
        bias[-16:] = 0
        return bias

    for _, layer in p.layers():
        p.bias(layer.self_attn.q_proj, cut)
