"""Harmless: the same by another formula, in another order, or in another dtype within."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

from lockstep.engine.rules import rope
from lockstep.engine.rules.norm import effective
from tests.workbench.diagnosis.bugs.bug import control
from tests.workbench.diagnosis.bugs.engine_ranks import Spoilt


@control("scores", model="qwen3-moe", tp=2, ep=2)
def softmax_of_the_router_by_its_logarithm(p: Spoilt) -> None:
    """exp(x - log(sum(exp(x)))), in double precision within."""

    def scores(logits, experts):
        wide = logits.double()
        return (wide - wide.logsumexp(-1, keepdim=True)).exp().float()

    p.rules(router_scores=scores)


@control("combine", model="granite4-moe", ep=1)
def outer_slots_are_summed_before_the_middle_one(p: Spoilt) -> None:
    def combine(outputs, weights):
        first, middle, last = (outputs.float() * weights.float().unsqueeze(-1)).unbind(1)
        return ((first + last) + middle).to(outputs.dtype)

    p.rules(combine=combine)


@control("shared", model="qwen2-moe", dtype="bfloat16", tp=2, ep=2)
def gated_shared_expert_is_rounded_once_with_the_sum(p: Spoilt) -> None:
    def add(routed, shared, gate, comm):
        return torch.addcmul(routed.float(), gate.float().sigmoid(), shared.float()).to(routed.dtype)

    p.rules(shared_expert=add)


@control("activation", model="gpt-oss", tp=2, ep=2)
def clamped_swiglu_by_an_exponential(p: Spoilt) -> None:
    """Gate over 1 + exp(-slope gate), and gate times up added to it, in place of up + 1."""

    def act(gate, up, activation):
        gate = gate.clamp(max=activation.limit)
        let = gate / (1 + (-activation.slope * gate).exp())
        return torch.addcmul(let, let, up.clamp(-activation.limit, activation.limit))

    p.rules(act=act)


@control("activation", model="gemma4-moe", ep=1)
def gelu_by_a_sigmoid(p: Spoilt) -> None:
    """(1 + tanh(y)) / 2 is the sigmoid of 2 y."""

    def act(gate, up, activation):
        inner = math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)
        return gate * (2 * inner).sigmoid() * up

    p.rules(act=act)


@control("reduce", model="deepseek-v3", tp=4, ep=2)
def ranks_are_summed_in_pairs_beginning_with_the_outer_ones(p: Spoilt) -> None:
    def reduce(partial, comm):
        first, second, third, fourth = comm.ring.gather(comm.rank, partial.clone())
        return partial.copy_((first + fourth) + (second + third))

    p.rules(reduce=reduce)


@control("sinks", model="gpt-oss", tp=4, ep=1)
def sink_is_put_behind_a_softmax_by_the_sum_of_logarithms(p: Spoilt) -> None:
    """As kernels do that know no sinks: probabilities times the sigmoid of log-sum minus sink."""

    def softmax(scores, sinks, dtype):
        wide = scores.float()
        share = (wide.logsumexp(-1, keepdim=True) - sinks.float()).sigmoid()
        return (wide.softmax(-1) * share).to(dtype)

    p.rules(sinks=softmax)


@control("cap", model="vaultgemma", tp=2, ep=1)
def cap_of_the_scores_in_double_precision(p: Spoilt) -> None:
    p.rules(soft_cap=lambda x, cap: (cap * (x.double() / cap).tanh()).to(x.dtype))


@control("rotation", model="gemma3", dtype="bfloat16", tp=2, ep=1)
def products_of_the_rotation_are_rounded_once(p: Spoilt) -> None:
    def turned(x, cos, sin):
        return rope.rotate_half_split(x.float(), cos.float(), sin.float()).to(x.dtype)

    p.rules(rope=turned)


@control("norm", model="cohere2", tp=2, ep=1)
def variance_is_the_mean_square_less_the_square_of_the_mean(p: Spoilt) -> None:
    """In double precision, where nothing is lost by that."""

    def norm(bias, x, weight, eps, form):
        wide = x.double()
        mean = wide.mean(-1, keepdim=True)
        variance = wide.square().mean(-1, keepdim=True) - mean.square()
        normed = ((wide - mean) * (variance + eps).rsqrt()).to(x.dtype) * effective(weight, form)
        return normed if bias is None else normed + bias

    p.rules(layer_norm=norm)


@control("latent", model="deepseek-v2", tp=2, ep=1)
def expansion_of_the_latents_is_summed_in_thirds(p: Spoilt) -> None:
    def spoil(decoder):
        for layer in decoder.layers:
            weight = layer.attention.products["kv_b_proj"].weight
            (matrix,) = weight.parts().values()

            def product(x, bias=None, matrix=matrix):
                parts = zip(x.split(8, -1), matrix.split(8, -1), strict=True)
                return sum(F.linear(own, columns) for own, columns in parts)

            weight.product = product

    p.loaded(spoil)


@control("indexer", model="glm-moe-dsa", tp=2, ep=1)
def norm_of_index_keys_by_two_sums(p: Spoilt) -> None:
    def norm(bias, x, weight, eps, form):
        centred = x - x.sum(-1, keepdim=True) / x.shape[-1]
        root = (centred.square().sum(-1, keepdim=True) / x.shape[-1] + eps).sqrt()
        return centred / root * weight + bias

    p.rules(index_norm=norm)


@control("norm", model="qwen3.5", tp=2, ep=1)
def queries_and_keys_are_divided_by_a_root(p: Spoilt) -> None:
    def normed(x):
        wide = x.double()
        return (wide / (wide.square().sum(-1, keepdim=True) + 1e-6).sqrt()).float()

    p.rules(l2_norm=normed)


@control("convolution", model="qwen3.5-moe", tp=2, ep=2)
def convolution_as_a_product_with_unfolded_rows(p: Spoilt) -> None:
    """And SiLU as x over 1 + exp(-x)."""

    def convolved(rows, weight):
        found = torch.einsum("tcw,cw->tc", rows.unfold(0, weight.shape[1], 1), weight)
        return found / (1 + (-found).exp())

    p.rules(short_conv=convolved)


@control("gated norm", model="granite4", dtype="bfloat16", tp=2, ep=1)
def gated_norm_of_mamba_is_rounded_behind_its_weight(p: Spoilt) -> None:
    def gated(x, gate, weight, normalised):
        return (weight.float() * normalised(x.float() * F.silu(gate.float()))).to(x.dtype)

    p.rules(ssm_norm=gated)
