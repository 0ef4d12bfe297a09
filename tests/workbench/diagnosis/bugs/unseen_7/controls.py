"""Harmless changes: what engines do otherwise, and rightly. No cause may be reported for any."""

from __future__ import annotations

import torch
from torch import nn

from tests.workbench.diagnosis.bugs.bug import control
from tests.workbench.diagnosis.bugs.patched import Patched


@control("attention", model="llama-sharp")
def softmax_takes_off_a_rounded_maximum(p: Patched) -> None:
    def softmax(scores):
        powers = (scores - scores.amax(-1, keepdim=True).round()).exp()
        return powers / powers.sum(-1, keepdim=True)

    p.attention(softmax=softmax)


@control("mask", model="mistral-window")
def mask_made_from_positions_for_each_query(p: Patched) -> None:
    def allow(allowed):
        new, keys = allowed.shape[-2:]
        distance = torch.arange(keys - new, keys)[:, None] - torch.arange(keys)
        return ((distance >= 0) & (distance < 8)).expand_as(allowed)

    p.attention(allow=allow)


@control("attention", model="qwen2-untied", dtype="bfloat16")
def queries_padded_to_whole_tiles_of_eight(p: Patched) -> None:
    def product(q, k):
        padded = nn.functional.pad(q, (0, 0, 0, -q.shape[2] % 8))
        return (padded @ k.transpose(2, 3))[:, :, : q.shape[2]]

    p.attention(product=product)


@control("attention", model="qwen3", dtype="bfloat16")
def context_accumulated_in_float32(p: Patched) -> None:
    p.attention(context=lambda probs, v: (probs.float() @ v.float()).to(v.dtype))


@control("cache", model="llama", tp=2)
def pages_gathered_by_their_table(p: Patched) -> None:
    """Slots of four, kept from the last page to the first."""

    def gathered(rows):
        at = torch.arange(rows.shape[2])
        kept = torch.cat(at.split(4)[::-1])
        return rows[:, :, kept][:, :, kept.argsort()]

    p.cache(read=lambda k, v: (gathered(k), gathered(v)))


@control("rope", model="llama-llama3")
def both_halves_of_a_head_rotated_apart(p: Patched) -> None:
    def rotate(_, q, k, cos, sin):
        def turned(x):
            c, s = (table[:, None, :, : x.shape[-1] // 2] for table in (cos, sin))
            one, two = x.chunk(2, -1)
            return torch.cat([one * c - two * s, two * c + one * s], -1)

        return turned(q), turned(k)

    p.rotate(rotate)


@control("norm", model="llama", dtype="bfloat16")
def second_norm_fused_with_the_sum_before_it(p: Patched) -> None:
    """It reads the sum before that is rounded."""
    for _, layer in p.layers():

        def forward(hidden_states, layer=layer, **kwargs):
            out, _ = layer.self_attn(hidden_states=layer.input_layernorm(hidden_states), **kwargs)
            middle = hidden_states.float() + out.float()
            return middle.to(out.dtype) + layer.mlp(layer.post_attention_layernorm(middle).to(out.dtype))

        layer.forward = forward


@control("mlp", model="qwen3-bias")
def units_of_the_mlp_in_three_products(p: Patched) -> None:
    for i, _ in p.layers():
        down = p.mlp(i).down_proj

        def around(_, x, down=down):
            parts = zip(x.chunk(3, -1), down.weight.chunk(3, 1), strict=True)
            return sum(part @ weight.t() for part, weight in parts)

        p.wrap(down, around)


@control("linear", model="llama-bias")
def columns_of_each_product_in_blocks_of_sixteen(p: Patched) -> None:
    for i, _ in p.layers():
        attn, mlp = p.attn(i), p.mlp(i)
        for side in (attn.q_proj, attn.k_proj, attn.v_proj, mlp.gate_proj, mlp.up_proj):

            def around(_, x, side=side):
                parts = zip(side.weight.split(16), side.bias.split(16), strict=True)
                return torch.cat([nn.functional.linear(x, w, b) for w, b in parts], -1)

            p.wrap(side, around)


@control("linear", model="llama-bias", dtype="bfloat16")
def queries_and_keys_of_the_other_sign(p: Patched) -> None:
    for i, _ in p.layers():
        for side in (p.attn(i).q_proj, p.attn(i).k_proj):
            p.weight(side, torch.neg)
            p.bias(side, torch.neg)


@control("sharding", model="qwen2-kv8", dtype="bfloat16", tp=4)
def ranks_summed_in_pairs(p: Patched) -> None:
    def reduce(partial):
        one, two, three, four = p.ring.gather(p.rank, partial)
        return (one + two) + (three + four)

    for i, _ in p.layers():
        p.attn(i).o_proj.reduce = reduce
        p.mlp(i).down_proj.reduce = reduce


@control("sharding", model="mistral-full", tp=2)
def message_summed_in_pieces_of_ten_columns(p: Patched) -> None:
    def reduce(partial):
        return torch.cat([p.ring.sum(p.rank, piece) for piece in partial.split(10, -1)], -1)

    for i, _ in p.layers():
        p.attn(i).o_proj.reduce = reduce
        p.mlp(i).down_proj.reduce = reduce


@control("embedding", model="qwen2-tied", dtype="bfloat16", tp=4)
def rows_of_foreign_ids_read_and_multiplied_by_zero(p: Patched) -> None:
    embed = p.decoder.embed_tokens

    def forward(ids):
        local = ids - embed.first
        mine = (local >= 0) & (local < len(embed.weight))
        rows = embed.weight[local.clamp(0, len(embed.weight) - 1)]
        return p.ring.sum(p.rank, (rows * mine[..., None]).float()).to(rows.dtype)

    embed.forward = forward


@control("head", model="qwen2-untied")
def head_padded_for_the_product_and_cut_again(p: Patched) -> None:
    padded = nn.functional.pad(p.model.lm_head.weight, (0, 0, 0, 61))
    p.wrap(p.model.lm_head, lambda _, x: (x @ padded.t())[..., :131])


@control("head", model="llama-yarn")
def logits_in_float64_and_rounded(p: Patched) -> None:
    head = p.model.lm_head
    p.wrap(head, lambda _, x: (x.double() @ head.weight.double().t()).float())
