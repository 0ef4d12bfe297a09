"""Harmless changes that a correct engine may have: other orders and layouts of the same numbers, wider types."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tests.workbench.diagnosis.bugs.bug import control
from tests.workbench.diagnosis.bugs.patched import Patched


def _fused(p: Patched, owner: Any, names: tuple[str, ...]) -> None:
    """One product for several layers of `owner`; each takes its columns of it."""
    modules = [getattr(owner, name) for name in names]
    weight = torch.cat([module.weight for module in modules])
    biased = modules[0].bias is not None
    bias = torch.cat([module.bias for module in modules]) if biased else None
    begin = 0
    for module in modules:
        end = begin + module.out_features
        module.forward = lambda x, begin=begin, end=end: nn.functional.linear(x, weight, bias)[..., begin:end]
        begin = end


@control("weights", model="qwen2-tied")
def qkv_and_gate_up_by_fused_products(p: Patched) -> None:
    for _, layer in p.layers():
        _fused(p, layer.self_attn, ("q_proj", "k_proj", "v_proj"))
        _fused(p, layer.mlp, ("gate_proj", "up_proj"))


@control("weights", model="llama")
def products_accumulated_in_float64(p: Patched) -> None:
    for module in p.decoder.layers.modules():
        if isinstance(module, nn.Linear):
            weight = module.weight.double()
            module.forward = lambda x, weight=weight: (x.double() @ weight.T).to(x.dtype)


@control("weights", model="qwen3")
def prompt_read_in_chunks_of_four(p: Patched) -> None:
    """Every product sees four rows at a time, and attention four queries."""
    for module in p.model.modules():
        if isinstance(module, nn.Linear):
            p.wrap(module, lambda forward, x: torch.cat([forward(one) for one in x.split(4, 1)], 1))
    p.attention(
        product=lambda q, k: torch.cat([one @ k.transpose(2, 3) for one in q.split(4, 2)], 2),
        context=lambda probs, v: torch.cat([one @ v for one in probs.split(4, 2)], 2),
    )


@control("weights", model="llama")
def channels_of_the_mlp_in_another_order(p: Patched) -> None:
    """Sorted as a quantiser likes them: gate, up and down agree."""
    for _, layer in p.layers():
        mlp, order = layer.mlp, torch.randperm(96)
        p.weight(mlp.gate_proj, lambda weight, order=order: weight[order])
        p.weight(mlp.up_proj, lambda weight, order=order: weight[order])
        p.weight(mlp.down_proj, lambda weight, order=order: weight[:, order])


@control("norm", model="qwen3")
def weight_of_each_norm_folded_into_what_reads_it(p: Patched) -> None:
    for _, layer in p.layers():
        attn, mlp = layer.self_attn, layer.mlp
        for norm, readers in (
            (layer.input_layernorm, (attn.q_proj, attn.k_proj, attn.v_proj)),
            (layer.post_attention_layernorm, (mlp.gate_proj, mlp.up_proj)),
        ):
            folded = norm.weight.detach().clone()
            for module in readers:
                p.weight(module, lambda weight, folded=folded: weight * folded)
            p.weight(norm, torch.ones_like)


@control("norm", model="qwen2-tied")
def norms_and_softmax_in_float64(p: Patched) -> None:
    def around(forward: Any, x: Tensor, norm: Any) -> Tensor:
        wide = x.double()
        wide = wide * (wide.pow(2).mean(-1, keepdim=True) + norm.variance_epsilon).rsqrt()
        return (wide * norm.weight.double()).to(x.dtype)

    for name, module in p.model.named_modules():
        if name.endswith("norm"):
            p.wrap(module, lambda forward, x, module=module: around(forward, x, module))
    p.attention(softmax=lambda scores: scores.double().softmax(-1).to(scores.dtype))


@control("norm", model="llama")
def norm_by_the_length_of_the_row(p: Patched) -> None:
    """x / ‖x‖ · sqrt(n), with epsilon where it belongs."""

    def around(forward: Any, x: Tensor, norm: Any) -> Tensor:
        size = x.shape[-1]
        length = (x.norm(dim=-1, keepdim=True).pow(2) + size * norm.variance_epsilon).sqrt()
        weighted: Tensor = norm.weight * (x * size**0.5 / length)
        return weighted

    for name, module in p.model.named_modules():
        if name.endswith("norm"):
            p.wrap(module, lambda forward, x, module=module: around(forward, x, module))


@control("mlp", model="mistral-full")
def silu_through_the_hyperbolic_tangent(p: Patched) -> None:
    for _, layer in p.layers():
        mlp = layer.mlp
        mlp.forward = lambda x, mlp=mlp: mlp.down_proj(_silu(mlp.gate_proj(x)) * mlp.up_proj(x))


def _silu(gate: Tensor) -> Tensor:
    return 0.5 * gate * (1 + (0.5 * gate).tanh())


@control("mlp", model="llama", dtype="bfloat16")
def activation_and_product_in_float32_in_a_bfloat16_model(p: Patched) -> None:
    for _, layer in p.layers():
        mlp = layer.mlp

        def forward(x: Tensor, mlp: Any = mlp) -> Any:
            gate, up = mlp.gate_proj(x).float(), mlp.up_proj(x).float()
            return mlp.down_proj((nn.functional.silu(gate) * up).to(x.dtype))

        mlp.forward = forward


@control("vocabulary", model="qwen2-tied")
def embedding_by_a_product_with_one_hot_rows(p: Patched) -> None:
    module = p.decoder.embed_tokens
    module.forward = lambda ids: (
        nn.functional.one_hot(ids, len(module.weight)).to(module.weight) @ module.weight
    )


@control("vocabulary", model="llama", tp=2)
def last_shard_padded_to_the_size_of_the_others(p: Patched) -> None:
    """66 rows on both ranks, for 131 ids; the surplus row is zero."""
    for module in (p.model.lm_head, p.decoder.embed_tokens):
        p.weight(module, lambda weight: nn.functional.pad(weight, (0, 0, 0, 66 - len(weight))))


@control("sharding", model="llama-bias", tp=2)
def rank_0_alone_brings_the_bias_into_the_sum(p: Patched) -> None:
    for _, layer in p.layers():
        for module in (layer.self_attn.o_proj, layer.mlp.down_proj):

            def forward(x: Tensor, module: Any = module) -> Tensor:
                bias = module.bias if p.rank == 0 else None
                partial = nn.functional.linear(x, module.weight, bias)
                module.see(partial)
                whole: Tensor = module.reduce(partial)
                return whole

            module.forward = forward


@control("sharding", model="qwen2-kv8", tp=4)
def sums_joined_in_pairs(p: Patched) -> None:
    def tree(partial: Tensor) -> Tensor:
        one, two, three, four = p.ring.gather(p.rank, partial)
        joined: Tensor = (one + three) + (two + four)
        return joined

    for _, layer in p.layers():
        layer.self_attn.o_proj.reduce = tree
        layer.mlp.down_proj.reduce = tree
