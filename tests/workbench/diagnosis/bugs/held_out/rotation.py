"""Held out: rotary embeddings: positions, frequencies, halves."""

from __future__ import annotations

import torch

from tests.workbench.diagnosis.bugs.bug import ROTATED, bug
from tests.workbench.diagnosis.bugs.patched import Patched


@bug("rope", accepted=("positions", "rope"), words="position", taps=ROTATED, model="qwen3")
def positions_count_the_padding(p: Patched) -> None:
    p.positions(lambda at: at + (7 if p.seq == 1 and not p.decode else 0))


@bug("rope", accepted=("positions", "rope"), words="position", taps=ROTATED, step=2, model="mistral-full")
def positions_stuck_after_the_prompt(p: Patched) -> None:
    p.positions(lambda at: at * 0 + p.model.prompt_lengths[p.seq] if p.decode else at)


@bug("rope", accepted=("positions", "rope"), words="position|wrap|table", taps=ROTATED, model="qwen3")
def positions_wrap_around(p: Patched) -> None:
    p.positions(lambda at: at % 8)


@bug("rope", accepted=("positions", "rope"), words="position", taps=ROTATED, step=3, model="llama")
def positions_restart_in_the_third_decode_step(p: Patched) -> None:
    p.positions(lambda at: at * 0 if p.step >= 3 else at)


@bug("rope", accepted=("positions", "rope"), words="position", taps=ROTATED, step=2, model="qwen2-tied")
def positions_move_every_other_step(p: Patched) -> None:
    p.positions(lambda at: at - p.step // 2)


@bug(
    "rope",
    accepted=("rope",),
    words="sign|direction|opposite|negative|backward|-1|minus",
    taps=ROTATED,
    model="llama",
)
def rotated_the_other_way(p: Patched) -> None:
    p.rotate(lambda apply, q, k, cos, sin: apply(q, k, cos, -sin))


def _partial(apply, q, k, cos, sin, part):
    """Only the first `part` of the dimensions."""
    dim = int(q.shape[-1] * part)
    half = dim // 2
    cos, sin = (torch.cat([x[..., :half], x[..., :half]], -1) for x in (cos, sin))
    first = apply(q[..., :dim], k[..., :dim], cos, sin)
    return tuple(torch.cat([new, old[..., dim:]], -1) for new, old in zip(first, (q, k), strict=True))


@bug("rope", accepted=("rope",), words="partial|part|half|dimension|0\\.5|pairs", taps=ROTATED, model="qwen3")
def half_of_the_dimensions_rotated(p: Patched) -> None:
    p.rotate(lambda *args: _partial(*args, 0.5))


def _some_pairs(cos, sin, keep):
    pairs = cos.shape[-1] // 2
    mask = torch.tensor([keep(i) for i in range(pairs)] * 2)
    return cos.where(mask, 1), sin.where(mask, 0)


@bug("rope", accepted=("rope",), words="pair|half|part|frequenc", taps=ROTATED, model="llama")
def every_other_pair_rotated(p: Patched) -> None:
    p.rotate(lambda apply, q, k, cos, sin: apply(q, k, *_some_pairs(cos, sin, lambda i: i % 2 == 0)))


@bug("rope", accepted=("rope",), words="pair|part|frequenc|last|lowest", taps=ROTATED, model="qwen3")
def last_pair_left_alone(p: Patched) -> None:
    p.rotate(lambda apply, q, k, cos, sin: apply(q, k, *_some_pairs(cos, sin, lambda i: i < 7)))


def _base(theta, dim):
    return 1 / theta ** (torch.arange(0, dim, 2).float() / dim)


@bug("rope", accepted=("rope",), words="theta|base", taps=ROTATED, model="llama")
def theta_of_another_release(p: Patched) -> None:
    p.frequencies(lambda inv: _base(5e5, 8))


@bug("rope", accepted=("rope",), words="theta|base", taps=ROTATED, step=1, model="qwen2-tied")
def theta_dropped_in_decode(p: Patched) -> None:
    p.angles(lambda rotary, x, at: _table(_base(1e4, 8), at) if p.decode else rotary(x, at))


def _table(inv, at, factor=1.0):
    angles = at[..., None].float() * inv
    angles = torch.cat([angles, angles], -1)
    return angles.cos() * factor, angles.sin() * factor


@bug("rope", accepted=("rope", "positions"), words="scal|factor|4", taps=ROTATED, model="llama-linear")
def linear_scaling_ignored(p: Patched) -> None:
    p.frequencies(lambda inv: inv * 4)


@bug("rope", accepted=("rope", "positions"), words="scal|factor|2|half", taps=ROTATED, model="qwen3")
def linear_scaling_where_there_is_none(p: Patched) -> None:
    p.frequencies(lambda inv: inv / 2)


@bug(
    "rope",
    accepted=("rope", "scale"),
    words="factor|attention|mscale|norm|scale|yarn",
    taps=ROTATED,
    model="llama-yarn",
)
def yarn_attention_factor_dropped(p: Patched) -> None:
    p.frequencies(lambda inv: inv, factor=1.0)


@bug(
    "rope",
    accepted=("rope",),
    words="not (been )?(rotat|applied)|never|unrotated|without|no rotation",
    taps=("attn.q_rope",),
    model="qwen2-tied",
)
def q_never_rotated(p: Patched) -> None:
    p.rotate(lambda apply, q, k, cos, sin: (q, apply(q, k, cos, sin)[1]))


@bug(
    "rope",
    accepted=("rope",),
    words="not (been )?(rotat|applied)|never|unrotated|without|no rotation",
    taps=("attn.k_rope",),
    layers=(1,),
    model="llama",
)
def k_never_rotated_in_one_layer(p: Patched) -> None:
    p.rotate(lambda apply, q, k, cos, sin: (apply(q, k, cos, sin)[0], k), (1,))


@bug("rope", accepted=("rope", "cache"), words="rotat|RoPE", taps=("attn.v_cache",), model="llama")
def v_rotated_too(p: Patched) -> None:
    def written(k, v):
        cos, sin = p.decoder.rotary_emb(v, torch.arange(p.past, p.past + p.new)[None])
        half = torch.cat([-v[..., v.shape[-1] // 2 :], v[..., : v.shape[-1] // 2]], -1)
        return k, v * cos[:, None] + half * sin[:, None]

    p.cache(written=written)


@bug(
    "rope",
    accepted=("rope", "heads"),
    words="head|not (been )?(rotat|applied)|never",
    taps=("attn.q_rope",),
    heads=(3,),
    layers=(1,),
    model="llama",
)
def one_head_of_q_not_rotated(p: Patched) -> None:
    def rotate(apply, q, k, cos, sin):
        right, right_k = apply(q, k, cos, sin)
        right = right.clone()
        right[:, 3] = q[:, 3]
        return right, right_k

    p.rotate(rotate, (1,))


@bug(
    "rope",
    accepted=("rope", "positions"),
    words="position|head",
    taps=("attn.k_rope",),
    heads=(1,),
    model="qwen2-tied",
)
def one_kv_head_at_other_positions(p: Patched) -> None:
    def rotate(apply, q, k, cos, sin):
        q_right, k_right = apply(q, k, cos, sin)
        k_right = k_right.clone()
        ahead = p.decoder.rotary_emb(q, torch.arange(p.past, p.past + p.new)[None] + 2)
        k_right[:, 1] = apply(k, k, *ahead)[0][:, 1]
        return q_right, k_right

    p.rotate(rotate)


@bug("rope", accepted=("rope",), words="twice|2|double|two", taps=("attn.k_rope",), step=1, model="llama")
def k_rotated_twice_in_decode(p: Patched) -> None:
    def rotate(apply, q, k, cos, sin):
        q, once = apply(q, k, cos, sin)
        return q, apply(once, once, cos, sin)[0] if p.decode else once

    p.rotate(rotate)


@bug("rope", accepted=("rope",), words="frequenc|theta|base|dimension|head_dim", taps=ROTATED, model="llama")
def frequencies_by_the_hidden_size(p: Patched) -> None:
    p.frequencies(lambda inv: 1 / 1e4 ** (torch.arange(0, 8, 2).float() / 64))


@bug("rope", accepted=("rope",), words="frequenc|order|revers", taps=ROTATED, model="llama")
def frequencies_in_reverse(p: Patched) -> None:
    p.frequencies(lambda inv: inv.flip(0))


@bug(
    "rope", accepted=("rope", "precision"), words="round|precis|float16|fp16|16", taps=ROTATED, model="qwen3"
)
def cos_and_sin_rounded_to_half(p: Patched) -> None:
    def table(rotary, x, at):
        cos, sin = rotary(x, at)
        return cos.half().float(), sin.half().float()

    p.angles(table)


@bug(
    "rope",
    accepted=("rope",),
    words="head|half|not|part",
    taps=("attn.q_rope",),
    heads=(4, 5, 6, 7),
    model="qwen2-tied",
)
def second_half_of_the_heads_not_rotated(p: Patched) -> None:
    def rotate(apply, q, k, cos, sin):
        right, right_k = apply(q, k, cos, sin)
        return torch.cat([right[:, :4], q[:, 4:]], 1), right_k

    p.rotate(rotate)
