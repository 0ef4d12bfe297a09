"""Harmless changes: another order of sums, equivalent forms, what has no effect. No cause may be reported for any."""

from __future__ import annotations

import math

import torch
from torch import nn

from tests.workbench.diagnosis.bugs.bug import control
from tests.workbench.diagnosis.bugs.patched import Patched, masked


def _nothing(p: Patched) -> None:
    pass


for _model in ("llama", "qwen2-tied", "qwen3", "mistral-window"):
    for _dtype in ("float32", "bfloat16", "float16"):
        _same = type(_nothing)(_nothing.__code__, globals(), f"unchanged_{_model}_{_dtype}".replace("-", "_"))
        control("unchanged", model=_model, dtype=_dtype)(_same)
for _tp in (2, 4):
    for _dtype in ("float32", "bfloat16"):
        _same = type(_nothing)(_nothing.__code__, globals(), f"unchanged_at_tp_{_tp}_{_dtype}")
        control("unchanged", model="qwen2-tied", dtype=_dtype, tp=_tp)(_same)


@control("unchanged", model="llama", dtype="float64")
def unchanged_in_double(p: Patched) -> None:
    pass


@control("unchanged", model="demo", dtype="bfloat16")
def unchanged_demo(p: Patched) -> None:
    pass


@control("unchanged", model="qwen2-large-bias")
def a_large_bias_that_is_right(p: Patched) -> None:
    pass


def _linears(p: Patched):
    for _, layer in p.layers():
        attn, mlp = layer.self_attn, layer.mlp
        yield from (
            attn.q_proj,
            attn.k_proj,
            attn.v_proj,
            attn.o_proj,
            mlp.gate_proj,
            mlp.up_proj,
            mlp.down_proj,
        )


# -- sums in another order --------------------------------------------------------------------------------------


def _by_parts(p: Patched) -> None:
    """Every product summed over its inputs in parts, backwards."""

    def forward(_, x, module):
        parts = [a @ b.t() for a, b in zip(x.split(16, -1), module.weight.split(16, 1), strict=True)]
        total = sum(reversed(parts))
        return total if module.bias is None else total + module.bias

    for module in _linears(p):
        p.wrap(module, lambda old, x, module=module: forward(old, x, module))


@control("order", model="llama")
def products_summed_in_parts(p: Patched) -> None:
    _by_parts(p)


@control("order", model="qwen2-tied", dtype="bfloat16")
def products_summed_in_parts_in_bfloat16(p: Patched) -> None:
    _by_parts(p)


@control("order", model="qwen3")
def products_in_double(p: Patched) -> None:
    for module in _linears(p):

        def forward(_, x, module=module):
            bias = None if module.bias is None else module.bias.double()
            return nn.functional.linear(x.double(), module.weight.double(), bias).float()

        p.wrap(module, forward)


@control("order", model="llama-bias")
def bias_added_afterwards(p: Patched) -> None:
    for module in _linears(p):
        p.wrap(module, lambda _, x, module=module: nn.functional.linear(x, module.weight) + module.bias)


@control("order", model="qwen2-tied")
def q_k_and_v_in_one_product(p: Patched) -> None:
    for i, _ in p.layers():
        sides = [p.attn(i).q_proj, p.attn(i).k_proj, p.attn(i).v_proj]
        weight, bias = (torch.cat([getattr(side, name) for side in sides]) for name in ("weight", "bias"))
        sizes = [side.out_features for side in sides]
        for at, side in enumerate(sides):

            def forward(_, x, at=at, weight=weight, bias=bias, sizes=sizes):
                return nn.functional.linear(x, weight, bias).split(sizes, -1)[at]

            p.wrap(side, forward)


@control("order", model="llama", dtype="float16")
def gate_and_up_in_one_product(p: Patched) -> None:
    for i, _ in p.layers():
        sides = [p.mlp(i).gate_proj, p.mlp(i).up_proj]
        weight = torch.cat([side.weight for side in sides])
        for at, side in enumerate(sides):

            def forward(_, x, at=at, weight=weight):
                return nn.functional.linear(x, weight).chunk(2, -1)[at]

            p.wrap(side, forward)


@control("order", model="llama")
def tokens_in_a_larger_batch(p: Patched) -> None:
    for module in _linears(p):
        p.wrap(module, lambda forward, x: forward(torch.cat([x, torch.randn(3, *x.shape[1:])]))[:1])


@control("order", model="qwen2-tied")
def tokens_one_by_one(p: Patched) -> None:
    for module in _linears(p):
        p.wrap(module, lambda forward, x: torch.cat([forward(row) for row in x.split(1, 1)], 1))


@control("order", model="llama", tp=2)
def ranks_summed_backwards(p: Patched) -> None:
    for i, _ in p.layers():
        for module in (p.attn(i).o_proj, p.mlp(i).down_proj):
            module.reduce = lambda partial: sum(reversed(p.ring.gather(p.rank, partial)))


@control("order", model="llama", dtype="bfloat16", tp=4)
def ranks_summed_in_float32(p: Patched) -> None:
    for i, _ in p.layers():
        for module in (p.attn(i).o_proj, p.mlp(i).down_proj):
            module.reduce = lambda partial: p.ring.sum(p.rank, partial.float()).bfloat16()


@control("order", model="llama-bias", tp=2)
def row_bias_added_by_the_first_rank(p: Patched) -> None:
    for i, _ in p.layers():
        for module in (p.attn(i).o_proj, p.mlp(i).down_proj):
            bias, module.bias = module.bias, None
            module.reduce = lambda partial, b=bias: p.ring.sum(p.rank, partial + (b if p.rank == 0 else 0))


@control("order", model="qwen3")
def residual_added_the_other_way_round(p: Patched) -> None:
    for i, _ in p.layers():
        p.residuals(i, lambda r, o: o + r, lambda r, o: o + r)


# -- attention --------------------------------------------------------------------------------------------------


@control("mask", model="llama")
def mask_of_minus_a_billion(p: Patched) -> None:
    p.attention(mask=lambda s, allowed: s.masked_fill(~allowed, -1e9))


@control("mask", model="qwen2-tied")
def mask_of_minus_infinity(p: Patched) -> None:
    p.attention(mask=lambda s, allowed: s.masked_fill(~allowed, -math.inf))


@control("mask", model="mistral-window", dtype="bfloat16")
def mask_of_minus_ten_thousand(p: Patched) -> None:
    p.attention(mask=lambda s, allowed: s.masked_fill(~allowed, -1e4))


@control("mask", model="qwen3", dtype="float16")
def mask_of_half_the_most_negative(p: Patched) -> None:
    p.attention(mask=lambda s, allowed: s.masked_fill(~allowed, -30000.0))


@control("mask", model="llama")
def mask_subtracted_from_the_scores(p: Patched) -> None:
    p.attention(mask=lambda s, allowed: s - 1e9 * (~allowed))


@control("mask", model="llama")
def a_window_wider_than_the_text(p: Patched) -> None:
    def allow(allowed):
        keys, queries = allowed.shape[-1], allowed.shape[-2]
        return allowed & (torch.arange(keys - queries, keys)[:, None] - torch.arange(keys) < 64)

    p.attention(allow=allow)


@control("attention", model="llama")
def scale_applied_to_q(p: Patched) -> None:
    scaling = p.attn(0).scaling
    p.attention(product=lambda q, k: (q * scaling) @ k.transpose(2, 3), scale=lambda s, _: s)


@control("attention", model="qwen3", dtype="bfloat16")
def half_of_the_scale_on_each_side(p: Patched) -> None:
    root = p.attn(0).scaling ** 0.5
    p.attention(product=lambda q, k: (q * root) @ (k * root).transpose(2, 3), scale=lambda s, _: s)


@control("folded", model="qwen3")
def scale_folded_into_the_rotated_q(p: Patched) -> None:
    def rotate(apply, q, k, cos, sin):
        q, k = apply(q, k, cos, sin)
        return q * 0.25, k

    p.rotate(rotate)
    p.attention(scale=lambda s, _: s)


@control("attention", model="llama", dtype="bfloat16")
def scores_in_float32(p: Patched) -> None:
    p.attention(product=lambda q, k: (q.float() @ k.float().transpose(2, 3)).bfloat16())


@control("attention", model="qwen2-tied")
def groups_without_repeating(p: Patched) -> None:
    def product(q, k):
        grouped = q.unflatten(1, (k.shape[1], -1))
        return torch.einsum("bghtd,bgkd->bghtk", grouped, k).flatten(1, 2)

    def context(probs, v):
        return torch.einsum("bghtk,bgkd->bghtd", probs.unflatten(1, (v.shape[1], -1)), v).flatten(1, 2)

    p.attention(keys=lambda kv, groups: kv, values=lambda kv, groups: kv, product=product, context=context)


@control("attention", model="llama")
def softmax_in_blocks(p: Patched) -> None:
    def softmax(s):
        top = torch.full_like(s[..., :1], -math.inf)
        total = torch.zeros_like(top)
        for block in s.split(4, -1):
            higher = torch.maximum(top, block.amax(-1, keepdim=True))
            total = total * (top - higher).exp() + (block - higher).exp().sum(-1, keepdim=True)
            top = higher
        return (s - top).exp() / total

    p.attention(softmax=softmax)


@control("attention", model="llama")
def softmax_in_double(p: Patched) -> None:
    p.attention(softmax=lambda s: s.double().softmax(-1).float())


@control("attention", model="qwen3")
def softmax_by_powers_of_two(p: Patched) -> None:
    def softmax(s):
        e = torch.exp2((s - s.amax(-1, keepdim=True)) * math.log2(math.e))
        return e / e.sum(-1, keepdim=True)

    p.attention(softmax=softmax)


@control("attention", model="llama")
def context_by_fused_attention(p: Patched) -> None:
    """The output is that of scaled_dot_product_attention; scores and probabilities are reported beside it."""
    held = {}

    def product(q, k):
        held.update(q=q, k=k)
        return q @ k.transpose(2, 3)

    def mask(s, allowed):
        held.update(allowed=allowed)
        return masked(s, allowed)

    def context(probs, v):
        mask = held["allowed"].expand(1, 1, probs.shape[2], probs.shape[3])
        return nn.functional.scaled_dot_product_attention(held["q"], held["k"], v, attn_mask=mask)

    p.attention(product=product, mask=mask, context=context)


@control("attention", model="qwen2-tied")
def queries_in_chunks(p: Patched) -> None:
    p.attention(
        product=lambda q, k: torch.cat([part @ k.transpose(2, 3) for part in q.split(4, 2)], 2),
        context=lambda probs, v: torch.cat([part @ v for part in probs.split(4, 2)], 2),
    )


@control("attention", model="llama")
def a_static_cache_with_masked_slots(p: Patched) -> None:
    """Slots that nobody has written yet are attended to with probability zero."""

    def read(k, v):
        more = torch.zeros_like(k[:, :, :1]).repeat(1, 1, 3, 1)
        return torch.cat([k, more], 2), torch.cat([v, more], 2)

    def product(q, k):
        return q @ k.transpose(2, 3)

    def mask(s, allowed):
        keys, queries = s.shape[-1] - 3, s.shape[-2]
        right = torch.arange(keys - queries, keys)[:, None] >= torch.arange(keys + 3)
        return masked(s, right.expand(1, 1, queries, keys + 3))

    p.cache(read=read)
    p.attention(product=product, mask=mask)


# -- norms, rotation, activation ------------------------------------------------------------------------------------


def _norms(p: Patched):
    for _, layer in p.layers():
        yield from (layer.input_layernorm, layer.post_attention_layernorm)
    yield p.decoder.norm


@control("norm", model="llama")
def norm_by_a_division(p: Patched) -> None:
    for norm in _norms(p):
        norm.forward = lambda x, n=norm: n.weight * (x / (x.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt())


@control("norm", model="llama", dtype="bfloat16")
def norm_weight_multiplied_in_float32(p: Patched) -> None:
    for norm in _norms(p):

        def forward(x, n=norm):
            wide = x.float()
            wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)
            return (n.weight.float() * wide).to(x.dtype)

        norm.forward = forward


@control("norm", model="qwen3")
def epsilon_within_rounding(p: Patched) -> None:
    for norm in _norms(p):
        norm.variance_epsilon = 1e-5 * (1 + 1e-6)


@control("norm", model="qwen2-tied", dtype="float16")
def norm_of_the_halved_input(p: Patched) -> None:
    for norm in _norms(p):

        def forward(x, n=norm):
            wide = x.float() / 2
            wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5 / 4)
            return n.weight * wide.to(x.dtype)

        norm.forward = forward


@control("folded", model="llama")
def norm_weights_folded_into_the_products(p: Patched) -> None:
    for i, layer in p.layers():
        attn, mlp = p.attn(i), p.mlp(i)
        for norm, sides in (
            (layer.input_layernorm, (attn.q_proj, attn.k_proj, attn.v_proj)),
            (layer.post_attention_layernorm, (mlp.gate_proj, mlp.up_proj)),
        ):
            scale = norm.weight.detach().clone()
            for side in sides:
                p.weight(side, lambda w, scale=scale: w * scale)
            p.weight(norm, torch.ones_like)


@control("rope", model="llama")
def rotation_by_complex_numbers(p: Patched) -> None:
    def rotate(apply, q, k, cos, sin):
        half = cos.shape[-1] // 2
        turn = torch.complex(cos[:, None, :, :half], sin[:, None, :, :half])

        def turned(x):
            z = torch.complex(x[..., :half].contiguous(), x[..., half:].contiguous()) * turn
            return torch.cat([z.real, z.imag], -1)

        return turned(q), turned(k)

    p.rotate(rotate)


@control("rope", model="qwen3")
def angles_in_double(p: Patched) -> None:
    inv = 1 / 1e6 ** (torch.arange(0, 16, 2).double() / 16)

    def table(rotary, x, at):
        angles = at[..., None].double() * inv
        angles = torch.cat([angles, angles], -1)
        return angles.cos().float(), angles.sin().float()

    p.angles(table)


@control("rope", model="llama", dtype="bfloat16")
def rotation_in_float32(p: Patched) -> None:
    def rotate(apply, q, k, cos, sin):
        q, k = apply(q.float(), k.float(), cos.float(), sin.float())
        return q.bfloat16(), k.bfloat16()

    p.rotate(rotate)


@control("mlp", model="llama")
def silu_by_its_exponential(p: Patched) -> None:
    for i, _ in p.layers():
        p.mlp(i).act_fn.forward = lambda x: x / (1 + (-x).exp())


@control("mlp", model="qwen3")
def silu_by_tanh(p: Patched) -> None:
    for i, _ in p.layers():
        p.mlp(i).act_fn.forward = lambda x: x * 0.5 * (1 + torch.tanh(x / 2))


@control("mlp", model="llama", dtype="bfloat16")
def activation_in_float32(p: Patched) -> None:
    for i, _ in p.layers():
        p.mlp(i).act_fn.forward = lambda x: nn.functional.silu(x.float()).to(x.dtype)


# -- equivalent weights ---------------------------------------------------------------------------------------------


def _heads(w: torch.Tensor, order: list[int], dim: int) -> torch.Tensor:
    """Rows of the heads in another order."""
    return w.unflatten(0, (-1, dim))[order].flatten(0, 1).contiguous()


@control("equivalent", model="llama")
def query_heads_in_another_order_within_their_group(p: Patched) -> None:
    order = [1, 0, 3, 2, 5, 4, 7, 6]
    for i, _ in p.layers():
        p.weight(p.attn(i).q_proj, lambda w: _heads(w, order, 8))
        p.weight(p.attn(i).o_proj, lambda w: _heads(w.t(), order, 8).t().contiguous())


@control("equivalent", model="llama")
def kv_groups_in_another_order(p: Patched) -> None:
    order = [6, 7, 2, 3, 4, 5, 0, 1]
    for i, _ in p.layers():
        p.weight(p.attn(i).q_proj, lambda w: _heads(w, order, 8))
        p.weight(p.attn(i).o_proj, lambda w: _heads(w.t(), order, 8).t().contiguous())
        for side in (p.attn(i).k_proj, p.attn(i).v_proj):
            p.weight(side, lambda w: _heads(w, [3, 1, 2, 0], 8))


@control("equivalent", model="qwen3")
def mlp_units_in_another_order(p: Patched) -> None:
    for i, _ in p.layers():
        mlp = p.mlp(i)
        for side in (mlp.gate_proj, mlp.up_proj):
            p.weight(side, lambda w: w.flip(0))
        p.weight(mlp.down_proj, lambda w: w.flip(1))


@control("equivalent", model="llama")
def interleaved_rows_with_interleaved_rotation(p: Patched) -> None:
    """llama.cpp's layout: rows of q and k moved, neighbours rotated; every score is the same."""
    dim = 8

    def rows(w):
        return w.view(-1, 2, dim // 2, w.shape[1]).transpose(1, 2).reshape(w.shape)

    def rotate(apply, q, k, cos, sin):
        def turn(x):
            c, s = (y[:, None, :, : y.shape[-1] // 2] for y in (cos, sin))
            one, two = x[..., ::2], x[..., 1::2]
            return torch.stack([one * c - two * s, two * c + one * s], -1).flatten(-2)

        return turn(q), turn(k)

    for i, _ in p.layers():
        for side in (p.attn(i).q_proj, p.attn(i).k_proj):
            p.weight(side, rows)
    p.rotate(rotate)


@control("folded", model="qwen3")
def v_doubled_and_o_halved(p: Patched) -> None:
    for i, _ in p.layers():
        p.weight(p.attn(i).v_proj, lambda w: 2 * w)
        p.weight(p.attn(i).o_proj, lambda w: w / 2)


@control("folded", model="llama")
def up_doubled_and_down_halved(p: Patched) -> None:
    for i, _ in p.layers():
        p.weight(p.mlp(i).up_proj, lambda w: 2 * w)
        p.weight(p.mlp(i).down_proj, lambda w: w / 2)


@control("vocabulary", model="llama")
def head_padded_with_rows_of_zeros(p: Patched) -> None:
    p.weight(p.model.lm_head, lambda w: nn.functional.pad(w, (0, 0, 0, 5)))


@control("vocabulary", model="qwen2-tied")
def embedding_padded_with_rows(p: Patched) -> None:
    p.weight(p.decoder.embed_tokens, lambda w: nn.functional.pad(w, (0, 0, 0, 13)))


@control("vocabulary", model="llama", dtype="bfloat16")
def head_in_float32(p: Patched) -> None:
    head = p.model.lm_head
    head.forward = lambda x: nn.functional.linear(x.float(), head.weight.float()).to(x.dtype)


@control("vocabulary", model="qwen3")
def embedding_by_a_product(p: Patched) -> None:
    table = p.decoder.embed_tokens
    table.forward = lambda ids: nn.functional.one_hot(ids, len(table.weight)).float() @ table.weight
