"""Harmless changes: what engines do otherwise, and rightly. No cause may be reported for any."""

from __future__ import annotations

import torch
from torch import nn

from tests.workbench.diagnosis.bugs.bug import control
from tests.workbench.diagnosis.bugs.patched import Patched


def _sides(p, i):
    attn, mlp = p.attn(i), p.mlp(i)
    return attn.q_proj, attn.k_proj, attn.v_proj, attn.o_proj, mlp.gate_proj, mlp.up_proj, mlp.down_proj


@control("attention", model="llama", dtype="bfloat16")
def attention_head_by_head(p: Patched) -> None:
    p.attention(
        product=lambda q, k: torch.cat(
            [q[:, h : h + 1] @ k[:, h : h + 1].transpose(2, 3) for h in range(q.shape[1])], 1
        ),
        context=lambda probs, v: torch.stack([probs[:, h] @ v[:, h] for h in range(v.shape[1])], 1),
    )


@control("attention", model="mistral-window")
def masked_scores_put_in_place_of_being_added_to(p: Patched) -> None:
    p.attention(mask=lambda s, allowed: torch.where(allowed, s, torch.finfo(s.dtype).min))


@control("rope", model="qwen3", tp=2)
def queries_and_keys_rotated_in_one_call(p: Patched) -> None:
    def rotate(apply, q, k, cos, sin):
        turned, _ = apply(torch.cat([q, k], 1), k, cos, sin)
        return turned.split([q.shape[1], k.shape[1]], 1)

    p.rotate(rotate)


@control("rope", model="llama-yarn")
def angles_read_from_a_table_of_all_positions(p: Patched) -> None:
    def table(rotary, x, at):
        cos, sin = rotary(x, torch.arange(256)[None])
        return cos[:, at[0]], sin[:, at[0]]

    p.angles(table)


@control("norm", model="qwen2-untied")
def squares_of_both_halves_summed_apart(p: Patched) -> None:
    for _, layer in p.layers():
        for norm in (layer.input_layernorm, layer.post_attention_layernorm):

            def forward(x, norm=norm):
                left, right = (half.pow(2).sum(-1, keepdim=True) for half in x.chunk(2, -1))
                return norm.weight * (x / ((left + right) / x.shape[-1] + norm.variance_epsilon).sqrt())

            norm.forward = forward


@control("mlp", model="llama-mha")
def silu_through_the_softplus(p: Patched) -> None:
    for _, layer in p.layers():

        def forward(x, mlp=layer.mlp):
            gate = mlp.gate_proj(x)
            return mlp.down_proj(gate * (-nn.functional.softplus(-gate)).exp() * mlp.up_proj(x))

        layer.mlp.forward = forward


@control("linear", model="llama-bias", dtype="bfloat16")
def weights_stored_transposed_and_read_so(p: Patched) -> None:
    for i, _ in p.layers():
        for side in _sides(p, i):
            stored = side.weight.t().contiguous()
            p.wrap(side, lambda _, x, stored=stored, side=side: (x @ stored) + side.bias)


@control("linear", model="qwen2-kv8", tp=2)
def tokens_padded_to_a_bucket_of_sixteen(p: Patched) -> None:
    """Each column-parallel product is of sixteen rows, of which those of the padding are dropped."""
    for i, _ in p.layers():
        query, key, value, _, gate, up, _ = _sides(p, i)
        for side in (query, key, value, gate, up):

            def around(forward, x):
                return forward(nn.functional.pad(x, (0, 0, 0, 16 - x.shape[1])))[:, : x.shape[1]]

            p.wrap(side, around)


@control("embedding", model="qwen3-bias")
def embedding_stored_by_columns(p: Patched) -> None:
    embed = p.decoder.embed_tokens
    stored = embed.weight.t().contiguous()
    embed.forward = lambda ids: stored[:, ids].movedim(0, -1).contiguous()


@control("sharding", model="llama", tp=4)
def sum_of_each_part_begins_at_another_rank(p: Patched) -> None:
    """As a ring scatters and gathers: each quarter of the columns is summed in its own order of ranks."""

    def reduce(partial):
        parts = [each.chunk(p.tp, -1) for each in p.ring.gather(p.rank, partial)]
        sums = []
        for column in range(p.tp):
            total = parts[column][column]
            for other in range(1, p.tp):
                total = total + parts[(column + other) % p.tp][column]
            sums.append(total)
        return torch.cat(sums, -1)

    for i, _ in p.layers():
        p.attn(i).o_proj.reduce = reduce
        p.mlp(i).down_proj.reduce = reduce
