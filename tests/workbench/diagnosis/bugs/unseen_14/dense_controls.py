"""Harmless in dense models: the same by another formula, in another order, or in another dtype within."""

from __future__ import annotations

import torch
from torch import Tensor

from lockstep.engine.config.families import Gating
from lockstep.engine.model import Decoder
from lockstep.engine.rules import defaults
from lockstep.engine.rules.norm import effective
from tests.workbench.diagnosis.bugs.bug import control
from tests.workbench.diagnosis.bugs.engine_ranks import RingComm, Spoilt


@control("rotation", model="llama-llama3", tp=2, ep=1)
def heads_are_turned_by_a_matrix_of_each_position(p: Spoilt) -> None:
    """As x cos + rotate_half(x) sin, with cosine and sine of the whole width."""

    def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        first, second = x.chunk(2, -1)
        swapped = torch.cat((-second, first), -1)
        return torch.addcmul(x * torch.cat((cos, cos), -1), swapped, torch.cat((sin, sin), -1))

    p.rules(rope=turned)


@control("softmax", model="qwen3", tp=2, ep=1)
def logarithm_of_the_sum_is_taken_off_the_scores(p: Spoilt) -> None:
    def softmax(scores: Tensor, dtype: torch.dtype) -> Tensor:
        wide = scores.float()
        return (wide - wide.logsumexp(-1, keepdim=True)).exp().to(dtype)

    p.rules(softmax=softmax)


@control("activation", model="iquestcoder", dtype="bfloat16", tp=2, ep=1)
def gate_and_up_are_multiplied_in_float32_and_rounded_once(p: Spoilt) -> None:
    def act(gate: Tensor, up: Tensor, activation: Gating) -> Tensor:
        wide = gate.float()
        return (wide * up.float() / (1 + (-wide).exp())).to(gate.dtype)

    p.rules(act=act)


@control("heads", model="qwen2-tied", tp=2, ep=1)
def every_query_head_is_given_a_copy_of_its_keys_and_values(p: Spoilt) -> None:
    def copies(kv: Tensor, kv_heads: int, group: int) -> Tensor:
        return defaults.share_kv_heads(kv, kv_heads, group).repeat_interleave(group, 1)

    p.rules(kv_expand=copies)


@control("norm", model="starcoder2", tp=2, ep=1)
def variance_is_made_of_the_means_of_rows_and_squares(p: Spoilt) -> None:
    def norm(bias: Tensor | None, x: Tensor, weight: Tensor, eps: float, form: str) -> Tensor:
        wide = x.float()
        mean = wide.mean(-1, keepdim=True)
        variance = wide.square().mean(-1, keepdim=True) - mean.square()
        out = (wide - mean) * (variance + eps).rsqrt() * effective(weight.float(), form)
        return (out if bias is None else out + bias).to(x.dtype)

    p.rules(layer_norm=norm)


@control("activation", model="gemma3", tp=2, ep=1)
def gelu_is_made_by_a_sigmoid(p: Spoilt) -> None:
    """1 + tanh(u) is twice the sigmoid of 2 u."""

    def act(gate: Tensor, up: Tensor, activation: Gating) -> Tensor:
        inner = (2 / torch.pi) ** 0.5 * (gate + 0.044715 * gate**3)
        return gate * (2 * inner).sigmoid() * up

    p.rules(act=act)


@control("reduce", model="llama-mha", tp=4, ep=1)
def ranks_are_summed_from_the_last_to_the_first(p: Spoilt) -> None:
    def reduce(partial: Tensor, comm: RingComm) -> Tensor:
        total = torch.zeros_like(partial)
        for one in reversed(comm.ring.gather(comm.rank, partial.clone())):
            total = total + one
        return partial.copy_(total)

    p.rules(reduce=reduce)


@control("projections", model="seed-oss", tp=2, ep=1)
def queries_keys_and_values_are_three_products(p: Spoilt) -> None:
    def spoil(decoder: Decoder) -> None:
        for layer in decoder.layers:
            weight = layer.attention.qkv.weight

            def product(x: Tensor, bias: Tensor | None = None, weight=weight) -> Tensor:
                parts = torch.cat([x @ part.T for part in weight.parts().values()], -1)
                return parts if bias is None else parts + bias

            weight.product = product

    p.loaded(spoil)
