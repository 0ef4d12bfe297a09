"""Harmless changes: what engines do otherwise, and rightly. No cause may be reported for any."""

from __future__ import annotations

import math

import torch
from torch import nn

from tests.workbench.diagnosis.bugs.bug import control
from tests.workbench.diagnosis.bugs.patched import Patched


def _linear(x, weight, bias):
    return nn.functional.linear(x, weight, bias)


def _whole(p, i):
    layer = p.full.model.layers[i]
    return layer.self_attn, layer.mlp


# -- attention --------------------------------------------------------------------------------------------------


@control("attention", model="llama", dtype="bfloat16")
def scores_and_softmax_in_float64_in_a_bfloat16_model(p: Patched) -> None:
    p.attention(
        product=lambda q, k: q.double() @ k.double().transpose(2, 3),
        softmax=lambda s: s.softmax(-1),
        context=lambda probs, v: (probs @ v.double()).to(v.dtype),
    )


@control("attention", model="qwen2-untied")
def scale_applied_to_the_keys(p: Patched) -> None:
    p.attention(product=lambda q, k: q @ (k / k.shape[-1] ** 0.5).transpose(2, 3), scale=lambda s, scaling: s)


@control("attention", model="qwen3")
def softmax_by_the_logarithm_of_the_sum(p: Patched) -> None:
    p.attention(softmax=lambda s: (s - s.logsumexp(-1, keepdim=True)).exp())


@control("attention", model="mistral-full")
def one_bound_for_all_rows_in_place_of_their_maximum(p: Patched) -> None:
    def softmax(s):
        powers = (s - 10).exp()
        return powers / powers.sum(-1, keepdim=True)

    p.attention(softmax=softmax)


@control("attention", model="mistral-window")
def each_query_goes_over_its_own_keys_alone(p: Patched) -> None:
    def softmax(s):
        probs = torch.zeros_like(s)
        for query in range(s.shape[2]):
            seen = s[0, 0, query] > torch.finfo(s.dtype).min / 2
            probs[:, :, query, seen] = s[:, :, query, seen].softmax(-1)
        return probs

    p.attention(softmax=softmax)


# -- rotation ---------------------------------------------------------------------------------------------------


@control("rope", model="qwen3-bias")
def angles_brought_into_one_turn_first(p: Patched) -> None:
    def table(rotary, x, at):
        angles = (at[..., None].double() * rotary.inv_freq.double()) % (2 * math.pi)
        angles = torch.cat([angles, angles], -1)
        return angles.cos().float(), angles.sin().float()

    p.angles(table)


@control("rope", model="qwen2-tied")
def base_raised_by_its_logarithm(p: Patched) -> None:
    step = -math.log(1e6) / 4
    p.frequencies(lambda inv: torch.exp(step * torch.arange(4).double()).float())


@control("rope", model="llama")
def rotation_by_a_matrix_of_each_position(p: Patched) -> None:
    def rotate(apply, q, k, cos, sin):
        size = q.shape[-1]
        one = torch.eye(size)
        turned = torch.cat([-one[size // 2 :], one[: size // 2]])
        matrices = cos[0, :, :, None] * one + sin[0, :, :, None] * turned
        return tuple(torch.einsum("tde,bhte->bhtd", matrices, x) for x in (q, k))

    p.rotate(rotate)


# -- products ---------------------------------------------------------------------------------------------------


@control("linear", model="qwen2-tied", tp=2)
def qkv_in_one_product_on_each_rank(p: Patched) -> None:
    for i, _ in p.layers():
        sides = [p.attn(i).q_proj, p.attn(i).k_proj, p.attn(i).v_proj]
        weight, bias = (torch.cat([getattr(side, name) for side in sides]) for name in ("weight", "bias"))
        sizes = [len(side.weight) for side in sides]
        for at, side in enumerate(sides):

            def forward(_, x, at=at, weight=weight, bias=bias, sizes=sizes):
                return _linear(x, weight, bias).split(sizes, -1)[at]

            p.wrap(side, forward)


@control("linear", model="mistral-full", dtype="bfloat16")
def gate_and_up_row_by_row_in_one_product(p: Patched) -> None:
    for i, _ in p.layers():
        sides = [p.mlp(i).gate_proj, p.mlp(i).up_proj]
        weight = torch.stack([side.weight for side in sides], 1).flatten(0, 1)
        for at, side in enumerate(sides):
            p.wrap(side, lambda _, x, at=at, weight=weight: _linear(x, weight, None)[..., at::2])


@control("linear", model="llama-bias")
def products_added_onto_the_bias(p: Patched) -> None:
    for i, layer in p.layers():
        for side in (layer.self_attn.q_proj, layer.self_attn.o_proj, p.mlp(i).gate_proj, p.mlp(i).down_proj):

            def forward(_, x, side=side):
                total = side.bias.expand(*x.shape[:-1], -1)
                for columns, rows in zip(x.split(16, -1), side.weight.split(16, 1), strict=True):
                    total = total + columns @ rows.t()
                return total

            p.wrap(side, forward)


@control("linear", model="llama")
def queries_doubled_and_keys_halved(p: Patched) -> None:
    for i, _ in p.layers():
        p.weight(p.attn(i).q_proj, lambda w: 2 * w)
        p.weight(p.attn(i).k_proj, lambda w: w / 2)


# -- norm, activation, head ---------------------------------------------------------------------------------------


@control("norm", model="llama")
def sum_of_squares_by_a_product_with_itself(p: Patched) -> None:
    for _, layer in p.layers():
        for norm in (layer.input_layernorm, layer.post_attention_layernorm):

            def forward(x, norm=norm):
                squares = x[..., None, :] @ x[..., None]
                return x / (squares[..., 0] / x.shape[-1] + norm.variance_epsilon).sqrt() * norm.weight

            norm.forward = forward


@control("mlp", model="qwen2-tied", dtype="bfloat16")
def gate_times_up_before_the_sigmoid_in_float32(p: Patched) -> None:
    for _, layer in p.layers():

        def forward(x, mlp=layer.mlp):
            gate, up = mlp.gate_proj(x).float(), mlp.up_proj(x).float()
            return mlp.down_proj((gate * up * gate.sigmoid()).to(x.dtype))

        layer.mlp.forward = forward


@control("head", model="qwen2-untied")
def head_in_blocks_of_32_ids(p: Patched) -> None:
    head = p.model.lm_head
    head.forward = lambda x: torch.cat([_linear(x, rows, None) for rows in head.weight.split(32)], -1)


@control("head", model="qwen3")
def logits_of_every_token_of_which_the_last_is_kept(p: Patched) -> None:
    held = {}
    p.wrap(p.decoder.norm, lambda forward, x: held.update(y=forward(x)) or held["y"])
    p.wrap(p.model.lm_head, lambda forward, x: forward(held["y"])[:, -1:])


# -- ranks --------------------------------------------------------------------------------------------------------


@control("sharding", model="llama", dtype="bfloat16", tp=4)
def ranks_summed_in_float32_with_compensation(p: Patched) -> None:
    def reduce(partial):
        total = lost = torch.zeros_like(partial, dtype=torch.float32)
        for part in p.ring.gather(p.rank, partial):
            term = part.float() - lost
            new = total + term
            lost, total = (new - total) - term, new
        return total.to(partial.dtype)

    for i, _ in p.layers():
        p.attn(i).o_proj.reduce = reduce
        p.mlp(i).down_proj.reduce = reduce


@control("sharding", model="mistral-full", tp=2)
def partial_products_in_float64(p: Patched) -> None:
    for i, _ in p.layers():
        for side in (p.attn(i).o_proj, p.mlp(i).down_proj):

            def forward(_, x, side=side):
                partial = _linear(x.double(), side.weight.double(), None)
                side.see(partial.float())
                return p.ring.sum(p.rank, partial).float()

            p.wrap(side, forward)


@control("sharding", model="qwen3", tp=4)
def units_of_the_mlp_dealt_in_turn(p: Patched) -> None:
    for i, _ in p.layers():
        _, whole = _whole(p, i)
        mine = slice(p.rank, None, p.tp)
        p.weight(p.mlp(i).gate_proj, lambda w, whole=whole, mine=mine: whole.gate_proj.weight[mine].clone())
        p.weight(p.mlp(i).up_proj, lambda w, whole=whole, mine=mine: whole.up_proj.weight[mine].clone())
        p.weight(
            p.mlp(i).down_proj, lambda w, whole=whole, mine=mine: whole.down_proj.weight[:, mine].clone()
        )


@control("sharding", model="llama", tp=2)
def embedding_cut_at_another_id(p: Patched) -> None:
    embed, whole = p.decoder.embed_tokens, p.full.model.embed_tokens.weight.detach()
    embed.first = 100 * p.rank
    p.weight(embed, lambda w: (whole[100:] if p.rank else whole[:100]).clone())
