"""Harmless changes: what engines do otherwise, and rightly. No cause may be reported for any."""

from __future__ import annotations

import torch
from torch import nn

from tests.workbench.diagnosis.bugs.bug import control
from tests.workbench.diagnosis.bugs.patched import Patched
from tests.workbench.diagnosis.bugs.sharded import bounds

_linear = nn.functional.linear


def _half(x):
    left, right = x.chunk(2, -1)
    return torch.cat([-right, left], -1)


def _columns(p, i):
    """The column-parallel layers of layer `i`."""
    return (*(getattr(p.attn(i), name) for name in ("q_proj", "k_proj", "v_proj")), *_gate_and_up(p, i))


def _gate_and_up(p, i):
    return p.mlp(i).gate_proj, p.mlp(i).up_proj


def _norms(p):
    for _, layer in p.layers():
        yield from (layer.input_layernorm, layer.post_attention_layernorm)
    yield p.decoder.norm


@control("unchanged", model="llama-three", dtype="float16", tp=4)
def unchanged_with_three_prompts_on_four_ranks(p: Patched) -> None:
    pass


@control("unchanged", model="mistral-long", dtype="bfloat16")
def unchanged_beyond_a_real_window(p: Patched) -> None:
    pass


@control("cache", model="llama", dtype="bfloat16")
def cache_kept_with_its_heads_innermost(p: Patched) -> None:
    """[slots, dimensions, heads], and back when it is read."""

    def through(rows):
        return rows.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2)

    p.cache(read=lambda k, v: (through(k), through(v)))


@control("cache", model="qwen3-kv4", tp=2)
def cache_of_64_slots_cut_to_its_length(p: Patched) -> None:
    def through(rows):
        memory = torch.full((*rows.shape[:2], 64, rows.shape[3]), torch.nan)
        memory[:, :, : rows.shape[2]] = rows
        return memory[:, :, : rows.shape[2]]

    p.cache(read=lambda k, v: (through(k), through(v)))


@control("attention", model="qwen2-untied")
def queries_taken_one_by_one_from_the_last(p: Patched) -> None:
    def product(q, k):
        rows = [q[:, :, [i]] @ k.transpose(2, 3) for i in reversed(range(q.shape[2]))]
        return torch.cat(rows[::-1], 2)

    p.attention(product=product)


@control("attention", model="llama-mha", dtype="bfloat16")
def context_divided_by_the_sum_at_the_end(p: Patched) -> None:
    """Of the exponentials, which stay as they are until the values are summed."""

    def context(probs, v):
        powers = probs.float() / probs.float().amax(-1, keepdim=True)
        return ((powers @ v.float()) / powers.sum(-1, keepdim=True)).to(v.dtype)

    p.attention(context=context)


@control("attention", model="llama-bias")
def heads_padded_with_zeros_to_a_tile_of_32(p: Patched) -> None:
    def wide(x):
        return nn.functional.pad(x, (0, 32 - x.shape[-1]))

    p.attention(
        product=lambda q, k: wide(q) @ wide(k).transpose(2, 3),
        context=lambda probs, v: (probs @ wide(v))[..., : v.shape[-1]],
    )


@control("attention", model="mistral-window")
def decode_in_splits_joined_by_their_logarithms(p: Patched) -> None:
    """Eight keys each, with the natural logarithm of their sum; one of them may lie outside the window."""

    def context(probs, v):
        if not p.decode:
            return probs @ v
        splits = list(zip(probs.split(8, -1), v.split(8, 2), strict=True))
        logs = torch.stack([part.sum(-1, keepdim=True).log() for part, _ in splits])
        owns = torch.stack(
            [part / part.sum(-1, keepdim=True).clamp(min=1e-30) @ rows for part, rows in splits]
        )
        return ((logs - logs.logsumexp(0)).exp() * owns).sum(0)

    p.attention(context=context)


@control("attention", model="qwen2-kv8", tp=4)
def queries_and_keys_spread_by_a_hadamard_matrix_for_the_product(p: Patched) -> None:
    two = torch.tensor([[1.0, 1.0], [1.0, -1.0]]) / 2**0.5
    eight = torch.kron(two, torch.kron(two, two))
    p.attention(product=lambda q, k: (q @ eight) @ (k @ eight).transpose(2, 3))


@control("attention", model="llama-bias", tp=2)
def root_of_the_scale_folded_into_both_projections(p: Patched) -> None:
    for i, _ in p.layers():
        attn = p.attn(i)
        for side in (attn.q_proj, attn.k_proj):
            p.weight(side, lambda w, attn=attn: w * attn.scaling**0.5)
            p.bias(side, lambda b, attn=attn: b * attn.scaling**0.5)
    p.attention(scale=lambda scores, scaling: scores)


@control("attention", model="llama-mha")
def scores_summed_dimension_by_dimension(p: Patched) -> None:
    def product(q, k):
        scores = torch.zeros(*q.shape[:3], k.shape[2])
        for d in reversed(range(q.shape[3])):
            scores = scores + q[..., d, None] * k[:, :, None, :, d]
        return scores

    p.attention(product=product)


@control("mask", model="mistral-window", dtype="bfloat16", tp=2)
def triangle_and_window_added_one_after_the_other(p: Patched) -> None:
    """Where both forbid a key their sum is minus infinity."""

    def mask(scores, allowed):
        new, keys = allowed.shape[-2:]
        lowest = torch.finfo(scores.dtype).min
        seen = torch.ones(new, keys, dtype=torch.bool).tril(keys - new)
        for one in (seen, allowed):
            scores = scores + torch.zeros_like(scores).masked_fill(~one, lowest)
        return scores

    p.attention(mask=mask)


@control("rope", model="qwen3", dtype="bfloat16")
def pairs_turned_in_float64_and_rounded(p: Patched) -> None:
    def rotate(_, q, k, cos, sin):
        cos, sin = cos[:, None].double(), sin[:, None].double()
        q, k = ((x.double() * cos + _half(x.double()) * sin).to(x.dtype) for x in (q, k))
        return q, k

    p.rotate(rotate)


@control("rope", model="llama-yarn", tp=2)
def pairs_of_the_rotation_in_another_order(p: Patched) -> None:
    """Rows of q and k are sorted by another order of the frequencies, and so is the table."""
    order = torch.tensor([2, 0, 3, 1])
    rows = torch.cat([order, order + 4])
    for i, _ in p.layers():
        for side in (p.attn(i).q_proj, p.attn(i).k_proj):
            p.weight(side, lambda w: w.unflatten(0, (-1, 8))[:, rows].flatten(0, 1))
    p.frequencies(lambda inverse: inverse[order])


@control("rope", model="qwen3-kv4", dtype="bfloat16")
def heads_normed_and_turned_before_they_are_rounded(p: Patched) -> None:
    for i, _ in p.layers():
        for norm in (p.attn(i).q_norm, p.attn(i).k_norm):

            def forward(x, norm=norm):
                wide = x.float()
                mean = wide.pow(2).mean(-1, keepdim=True)
                return norm.weight.float() * (wide * torch.rsqrt(mean + norm.variance_epsilon))

            norm.forward = forward

    def rotate(_, q, k, cos, sin):
        cos, sin = cos[:, None].float(), sin[:, None].float()
        q, k = ((x * cos + _half(x) * sin).bfloat16() for x in (q, k))
        return q, k

    p.rotate(rotate)


@control("norm", model="qwen2-tied")
def inverse_root_by_newton_s_steps(p: Patched) -> None:
    for norm in _norms(p):

        def forward(x, norm=norm):
            mean = x.pow(2).mean(-1, keepdim=True) + norm.variance_epsilon
            root = torch.rsqrt(mean.bfloat16()).float()
            for _ in range(4):
                root = root * (1.5 - 0.5 * mean * root * root)
            return norm.weight * (x * root)

        norm.forward = forward


@control("norm", model="llama-three", tp=2)
def tokens_shared_out_for_the_norms_and_gathered(p: Patched) -> None:
    def around(forward, x):
        mine = bounds(x.shape[1], p.tp, p.rank)
        return torch.cat(p.ring.gather(p.rank, forward(x[:, mine])), 1)

    for norm in _norms(p):
        p.wrap(norm, around)


@control("linear", model="qwen2-untied", tp=2)
def qkv_from_one_pack_by_kv_heads(p: Patched) -> None:
    """For each KV head its queries, its key, its value; the product is taken apart afterwards."""

    def spoil(attn):
        sides = (attn.q_proj, attn.k_proj, attn.v_proj)
        heads = attn.k_proj.out_features // 8

        def packed(name):
            parts = [getattr(side, name).detach() for side in sides]
            return torch.cat([part.unflatten(0, (heads, -1)) for part in parts], 1).flatten(0, 1)

        weight, bias = packed("weight"), packed("bias")
        sizes = [side.out_features // 8 // heads * 8 for side in sides]

        def product(x, which):
            whole = _linear(x, weight, bias).unflatten(-1, (heads, -1))
            return whole.split(sizes, -1)[which].flatten(2)

        for which, side in enumerate(sides):
            side.forward = lambda x, which=which: product(x, which)

    for side in (side for i, _ in p.layers() for side in _columns(p, i)):
        side.out_features = len(side.weight)
    for i, _ in p.layers():
        spoil(p.attn(i))


@control("linear", model="llama")
def weights_in_three_parts_of_bfloat16(p: Patched) -> None:
    def product(x, parts):
        first, second, third = (_linear(x, part) for part in parts)
        return first + (second + third)

    for i, _ in p.layers():
        for side in _columns(p, i):
            rest, parts = side.weight.detach(), []
            for _part in range(3):
                parts.append(rest.bfloat16().float())
                rest = rest - parts[-1]
            side.forward = lambda x, parts=parts: product(x, parts)


@control("linear", model="qwen3-bias")
def products_summed_from_the_last_input(p: Patched) -> None:
    for i, _ in p.layers():
        for side in (*_columns(p, i), p.attn(i).o_proj, p.mlp(i).down_proj):
            back = side.weight.detach().flip(1).contiguous()
            side.forward = lambda x, side=side, back=back: _linear(x.flip(-1).contiguous(), back, side.bias)


@control("quantisation", model="llama-three")
def inputs_and_columns_both_in_the_order_of_their_activity(p: Patched) -> None:
    """GPTQ's `desc_act`, with g_idx applied on both sides."""
    for i, _ in p.layers():
        for side in _columns(p, i):
            order = side.weight.detach().norm(dim=0).argsort(descending=True)
            sorted_ = side.weight.detach()[:, order].contiguous()
            side.forward = lambda x, order=order, sorted_=sorted_: _linear(x[..., order], sorted_)


@control("quantisation", model="qwen2-deep", dtype="bfloat16")
def weights_unpacked_from_exponents_and_mantissas(p: Patched) -> None:
    """Stored apart, without loss."""

    def unpacked(w):
        mantissa, exponent = torch.frexp(w.float())
        return torch.ldexp((mantissa * 256).to(torch.int16).float() / 256, exponent).to(w.dtype)

    for i, _ in p.layers():
        for side in (*_columns(p, i), p.attn(i).o_proj, p.mlp(i).down_proj):
            p.weight(side, unpacked)


@control("residual", model="mistral-full")
def channels_of_the_stream_in_another_order(p: Patched) -> None:
    """Sorted for a quantiser: what writes it and what reads it agree."""
    order = torch.randperm(64, generator=torch.Generator().manual_seed(9))
    p.weight(p.decoder.embed_tokens, lambda w: w[:, order])
    p.weight(p.model.lm_head, lambda w: w[:, order])
    for norm in _norms(p):
        p.weight(norm, lambda w: w[order])
    for i, _ in p.layers():
        for side in _columns(p, i):
            p.weight(side, lambda w: w[:, order])
        for side in (p.attn(i).o_proj, p.mlp(i).down_proj):
            p.weight(side, lambda w: w[order])


@control("mlp", model="mistral-full", dtype="bfloat16")
def silu_from_a_fine_table(p: Patched) -> None:
    """2^13 points between -16 and 16, with lines between them."""
    points = torch.linspace(-16, 16, 8193)
    table = nn.functional.silu(points)

    def act(x):
        at = (x.float().clamp(-16, 15.999) + 16) * 256
        low = at.long()
        return (table[low] + (at - low) * (table[low + 1] - table[low])).to(x.dtype)

    for i, _ in p.layers():
        p.wrap(p.mlp(i).act_fn, lambda _, x: act(x))


@control("mlp", model="llama-llama3")
def silu_by_powers_of_two(p: Patched) -> None:
    for i, _ in p.layers():
        p.wrap(p.mlp(i).act_fn, lambda _, x: x * torch.reciprocal(1 + torch.exp2(-1.4426950408889634 * x)))


@control("embedding", model="qwen2-three")
def sorted_ids_looked_up_and_put_back(p: Patched) -> None:
    def around(forward, ids):
        known, back = ids.unique(return_inverse=True)
        return forward(known[None])[:, back[0]]

    p.wrap(p.decoder.embed_tokens, around)


@control("embedding", model="qwen2-tied", dtype="bfloat16", tp=4)
def rows_of_the_embedding_dealt_in_turn(p: Patched) -> None:
    """Id n is on rank n % 4."""
    mine = p.full.model.embed_tokens.weight.detach()[p.rank :: p.tp]

    def forward(ids):
        here = ids % p.tp == p.rank
        rows = nn.functional.embedding((ids // p.tp).where(here, 0), mine)
        return p.ring.sum(p.rank, rows * here[..., None].to(rows.dtype))

    p.decoder.embed_tokens.forward = forward


@control("sharding", model="mistral-full", tp=2)
def kv_heads_dealt_in_turn_with_their_queries(p: Patched) -> None:
    """Rank 0 has the first and the third, rank 1 the others; o's columns follow."""
    kv = torch.arange(64).view(4, 16)[p.rank :: 2].flatten()
    queries = torch.arange(128).view(4, 32)[p.rank :: 2].flatten()
    for i, _ in p.layers():
        whole, attn = p.full.model.layers[i].self_attn, p.attn(i)
        p.weight(attn.q_proj, lambda w, whole=whole: whole.q_proj.weight.detach()[queries])
        p.weight(attn.k_proj, lambda w, whole=whole: whole.k_proj.weight.detach()[kv])
        p.weight(attn.v_proj, lambda w, whole=whole: whole.v_proj.weight.detach()[kv])
        p.weight(attn.o_proj, lambda w, whole=whole: whole.o_proj.weight.detach()[:, queries])


@control("sharding", model="qwen3", tp=4)
def replicated_keys_computed_once_and_sent(p: Patched) -> None:
    """Of each two ranks with the same KV head the first computes it."""

    def around(forward, x):
        return p.ring.gather(p.rank, forward(x))[p.rank // 2 * 2].clone()

    for i, _ in p.layers():
        for side in (p.attn(i).k_proj, p.attn(i).v_proj):
            p.wrap(side, around)


@control("collectives", model="llama-bias", tp=4)
def last_rank_alone_brings_the_biases_into_the_sums(p: Patched) -> None:
    def spoil(side):
        bias, known = side.bias, side.reduce
        side.bias = None
        side.reduce = lambda partial: known(partial + bias if p.rank == p.tp - 1 else partial)

    for i, _ in p.layers():
        spoil(p.attn(i).o_proj)
        spoil(p.mlp(i).down_proj)
