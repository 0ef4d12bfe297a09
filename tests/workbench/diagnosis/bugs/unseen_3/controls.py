"""Harmless changes that engines make: equal formulas, other layouts, folded scales, other orders of sums."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tests.workbench.diagnosis.bugs.bug import control
from tests.workbench.diagnosis.bugs.patched import Patched

Pair = tuple[Tensor, Tensor]


@control("attention", model="qwen3")
def one_maximum_for_a_whole_tile_of_queries(p: Patched) -> None:
    """Any number may be subtracted that lets nothing overflow."""

    def softmax(scores: Tensor) -> Tensor:
        raised = (scores - scores.amax((-2, -1), keepdim=True)).exp()
        return raised / raised.sum(-1, keepdim=True)

    p.attention(softmax=softmax)


@control("attention", model="llama")
def context_summed_over_splits_of_the_keys(p: Patched) -> None:
    def context(probs: Tensor, v: Tensor) -> Tensor:
        parts = zip(probs.split(5, -1), v.split(5, 2), strict=True)
        return sum(a @ b for a, b in parts)  # type: ignore[return-value]

    p.attention(context=context)


@control("attention", model="qwen3", dtype="bfloat16")
def scale_folded_into_the_norms_of_the_heads(p: Patched) -> None:
    """1 / sqrt(16): a half in the weight of each."""
    for i, _ in p.layers():
        attn = p.attn(i)
        p.weight(attn.q_norm, lambda w: w / 2)
        p.weight(attn.k_norm, lambda w: w / 2)
        attn.scaling = 1.0


@control("cache", model="llama")
def keys_rotated_when_they_are_read(p: Patched) -> None:
    held: dict[str, Any] = {}

    def rotate(apply: Any, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Pair:
        held.update(k=k, apply=apply)
        turned: Pair = apply(q, k, cos, sin)
        return turned

    def read(k: Tensor, v: Tensor) -> Pair:
        cos, sin = p.decoder.rotary_emb(k, torch.arange(k.shape[2])[None])
        return held["apply"](k, k, cos, sin)[1], v

    p.rotate(rotate)
    p.cache(written=lambda k, v: (held["k"], v), read=read)


@control("cache", model="mistral-full")
def pages_of_decode_walked_from_the_last(p: Patched) -> None:
    """Nothing is masked in decode: the order of the keys does not matter."""
    p.cache(read=lambda k, v: (k.flip(2), v.flip(2)) if p.decode else (k, v))


@control("rope", model="mistral-full")
def angles_by_turning_on_from_token_to_token(p: Patched) -> None:
    def table(rotary: Any, x: Tensor, at: Tensor) -> Pair:
        turn = torch.polar(torch.ones_like(rotary.inv_freq).double(), rotary.inv_freq.double())
        turned = torch.cat([torch.ones_like(turn)[None], turn.expand(int(at.max()), -1)]).cumprod(0)[at]
        turned = torch.cat([turned, turned], -1)
        return turned.real.to(x.dtype), turned.imag.to(x.dtype)

    p.angles(table)


@control("weights", model="qwen2-tied", dtype="bfloat16")
def bias_as_one_more_column(p: Patched) -> None:
    """The input has a one behind its last feature."""
    for i, _ in p.layers():
        for side in (p.attn(i).q_proj, p.attn(i).k_proj, p.attn(i).v_proj):
            wide = torch.cat([side.weight, side.bias[:, None]], 1)
            side.forward = lambda x, wide=wide: nn.functional.linear(
                nn.functional.pad(x, (0, 1), value=1.0), wide
            )


@control("weights", model="qwen3")
def products_on_tiles_padded_with_zeros(p: Patched) -> None:
    for module in p.decoder.layers.modules():
        if isinstance(module, nn.Linear):
            more = (0, -module.in_features % 40)
            padded = nn.functional.pad(module.weight, (*more, 0, -module.out_features % 40))

            def forward(
                x: Tensor, padded: Tensor = padded, more: Any = more, out: int = module.out_features
            ) -> Tensor:
                return (nn.functional.pad(x, more) @ padded.T)[..., :out]

            module.forward = forward  # type: ignore[method-assign]


@control("weights", model="llama")
def values_turned_by_a_hadamard_matrix_and_o_back(p: Patched) -> None:
    """Each head's eight dimensions, so that no channel of the cache stands out."""
    pair = torch.tensor([[1.0, 1.0], [1.0, -1.0]])
    turn = torch.kron(torch.kron(pair, pair), pair) / 8**0.5
    for i, _ in p.layers():
        attn = p.attn(i)
        p.weight(attn.v_proj, lambda w: (turn @ w.view(-1, 8, 64)).reshape(w.shape))
        p.weight(attn.o_proj, lambda w: (w.view(64, -1, 8) @ turn.T).reshape(w.shape))


@control("residual", model="qwen3")
def stream_kept_at_a_quarter_of_its_size(p: Patched) -> None:
    """Against overflow in half precision: what is added is scaled, and each epsilon by the square."""
    p.weight(p.decoder.embed_tokens, lambda w: w / 4)
    p.decoder.norm.variance_epsilon /= 16
    for _, layer in p.layers():
        p.weight(layer.self_attn.o_proj, lambda w: w / 4)
        p.weight(layer.mlp.down_proj, lambda w: w / 4)
        layer.input_layernorm.variance_epsilon /= 16
        layer.post_attention_layernorm.variance_epsilon /= 16


@control("norm", model="llama-massive", dtype="float16")
def largest_element_taken_out_before_squaring(p: Patched) -> None:
    for _, layer in p.layers():
        for norm in (layer.input_layernorm, layer.post_attention_layernorm):

            def forward(x: Tensor, norm: Any = norm) -> Any:
                wide = x.float()
                top = wide.abs().amax(-1, keepdim=True)
                wide = wide / top
                mean = wide.pow(2).mean(-1, keepdim=True) + norm.variance_epsilon / top**2
                return norm.weight * (wide * mean.rsqrt()).to(x.dtype)

            norm.forward = forward


@control("mlp", model="mistral-full")
def sigmoid_by_the_exponential_of_minus_the_magnitude(p: Patched) -> None:
    """Never overflows: 1 / (1 + e) where x is positive, e / (1 + e) elsewhere."""

    def silu(x: Tensor) -> Tensor:
        small = (-x.abs()).exp()
        return x * torch.where(x > 0, 1.0, small) / (1 + small)

    for i, _ in p.layers():
        p.mlp(i).act_fn.forward = silu


@control("sharding", model="qwen2-tied", tp=2)
def whole_embedding_on_each_rank(p: Patched) -> None:
    whole = p.full.model.embed_tokens.weight
    p.decoder.embed_tokens.forward = lambda ids: nn.functional.embedding(ids, whole)


@control("sharding", model="mistral-full", tp=4)
def sums_by_scattering_and_gathering(p: Patched) -> None:
    """Each quarter of the features is summed along the ring, from another rank on."""

    def reduce(partial: Tensor) -> Tensor:
        parts = [one.chunk(4, -1) for one in p.ring.gather(p.rank, partial)]
        return torch.cat([sum(parts[(c + j) % 4][c] for j in range(4)) for c in range(4)], -1)  # type: ignore[misc]

    for i, _ in p.layers():
        for module in (p.attn(i).o_proj, p.mlp(i).down_proj):
            module.reduce = reduce


@control("sharding", model="llama-bias", tp=4)
def row_bias_in_equal_parts_on_each_rank(p: Patched) -> None:
    for i, _ in p.layers():
        for module in (p.attn(i).o_proj, p.mlp(i).down_proj):
            bias, module.bias = module.bias, None
            module.reduce = lambda partial, bias=bias: p.ring.sum(p.rank, partial + bias / 4)
