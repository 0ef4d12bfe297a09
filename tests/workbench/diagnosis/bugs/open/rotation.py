"""Rotary embeddings: positions, frequencies, halves."""

from __future__ import annotations

import torch

from tests.workbench.diagnosis.bugs.bug import ROTATED, bug
from tests.workbench.diagnosis.bugs.patched import Patched


@bug("rope", accepted=("positions", "rope"), words="position", taps=ROTATED, step=1, model="llama")
def positions_one_too_far(p: Patched) -> None:
    p.positions(lambda at: at + 1 if p.decode else at)


@bug(
    "rope",
    accepted=("positions", "rope"),
    words="position",
    taps=ROTATED,
    layers=(1, 2),
    step=1,
    model="qwen2-tied",
)
def positions_counted_by_the_first_layer(p: Patched) -> None:
    p.positions(lambda at: at + 1 if p.decode else at, (1, 2))


@bug("rope", accepted=("positions", "rope"), words="position", taps=ROTATED, model="llama")
def positions_clamped(p: Patched) -> None:
    p.positions(lambda at: at.clamp(max=7))


@bug("rope", accepted=("positions", "rope"), words="position|revers", taps=ROTATED, model="llama")
def positions_reversed(p: Patched) -> None:
    p.positions(lambda at: at.flip(-1))


@bug("rope", accepted=("positions", "rope"), words="position", taps=ROTATED, step=1, model="qwen2-untied")
def positions_zero_in_decode(p: Patched) -> None:
    p.positions(lambda at: at * 0 if p.decode else at)


@bug("rope", accepted=("positions", "rope"), words="position|chunk", taps=ROTATED, model="llama")
def positions_restart_with_each_chunk(p: Patched) -> None:
    p.positions(lambda at: at % 4 if not p.decode else at)


@bug("rope", accepted=("positions", "rope"), words="position", taps=ROTATED, step=0, model="mistral-window")
def positions_held_at_the_window(p: Patched) -> None:
    p.positions(lambda at: at.clamp(max=8))


@bug(
    "rope",
    accepted=("positions", "rope"),
    words="position|rank",
    taps=ROTATED,
    ranks=(1,),
    step=1,
    model="llama",
    tp=2,
)
def positions_ahead_on_one_rank(p: Patched) -> None:
    if p.rank == 1:
        p.positions(lambda at: at + 1 if p.decode else at)


@bug(
    "rope",
    accepted=("positions", "rope"),
    words="position|rank",
    taps=ROTATED,
    ranks=(1,),
    step=1,
    model="qwen2-tied",
    tp=2,
)
def positions_stale_on_one_rank_in_decode(p: Patched) -> None:
    if p.rank == 1:
        p.positions(lambda at: at - 1 if p.decode else at)


@bug(
    "rope",
    accepted=("positions", "rope"),
    words="position",
    taps=("attn.k_rope",),
    layers=(1,),
    model="qwen3",
)
def k_rotated_by_the_cache_length(p: Patched) -> None:
    def rotate(apply, q, k, cos, sin):
        right, _ = apply(q, k, cos, sin)
        cos, sin = p.decoder.rotary_emb(q, torch.arange(p.past + 1, p.past + 1 + p.new)[None])
        return right, apply(q, k, cos, sin)[1]

    p.rotate(rotate, (1,))


@bug(
    "rope",
    accepted=("rope",),
    words="sign|direction|opposite|negative|backward|-1|minus",
    taps=("attn.k_rope",),
    layers=(2,),
    model="qwen2-tied",
)
def k_alone_rotated_the_other_way(p: Patched) -> None:
    p.rotate(lambda apply, q, k, cos, sin: (apply(q, k, cos, sin)[0], apply(q, k, cos, -sin)[1]), (2,))


@bug("rope", accepted=("rope",), words="sign|minus|half|reflect", taps=ROTATED, model="mistral-full")
def rotate_half_without_its_minus(p: Patched) -> None:
    def rotate(apply, q, k, cos, sin):
        def swapped(x):
            return torch.cat(x.chunk(2, -1)[::-1], -1)

        cos, sin = cos[:, None], sin[:, None]
        return q * cos + swapped(q) * sin, k * cos + swapped(k) * sin

    p.rotate(rotate)


def _partial(apply, q, k, cos, sin, part):
    """Only the first `part` of the dimensions."""
    dim = int(q.shape[-1] * part)
    half = dim // 2
    cos, sin = (torch.cat([x[..., :half], x[..., :half]], -1) for x in (cos, sin))
    first = apply(q[..., :dim], k[..., :dim], cos, sin)
    return tuple(torch.cat([new, old[..., dim:]], -1) for new, old in zip(first, (q, k), strict=True))


@bug(
    "rope",
    accepted=("rope",),
    words="partial|part|dimension|0\\.75|pairs",
    taps=ROTATED,
    layers=(1,),
    model="qwen3",
)
def three_quarters_rotated_in_one_layer(p: Patched) -> None:
    p.rotate(lambda *args: _partial(*args, 0.75), (1,))


@bug(
    "rope",
    accepted=("rope",),
    words="interleav|neighbour|adjacent|pairs",
    taps=ROTATED,
    layers=(2,),
    model="llama",
)
def interleaved_in_the_last_layer(p: Patched) -> None:
    def rotate(apply, q, k, cos, sin):
        def turn(x):
            c, s = (y[:, None, :, : y.shape[-1] // 2] for y in (cos, sin))
            one, two = x[..., ::2], x[..., 1::2]
            return torch.stack([one * c - two * s, two * c + one * s], -1).flatten(-2)

        return turn(q), turn(k)

    p.rotate(rotate, (2,))


@bug(
    "rope",
    accepted=("rope",),
    words="interleav|neighbour|adjacent|pairs",
    taps=("attn.k_rope",),
    model="qwen2-untied",
)
def k_alone_interleaved(p: Patched) -> None:
    def rotate(apply, q, k, cos, sin):
        c, s = (y[:, None, :, : y.shape[-1] // 2] for y in (cos, sin))
        one, two = k[..., ::2], k[..., 1::2]
        return apply(q, k, cos, sin)[0], torch.stack([one * c - two * s, two * c + one * s], -1).flatten(-2)

    p.rotate(rotate)


def _base(theta, dim):
    return 1 / theta ** (torch.arange(0, dim, 2).float() / dim)


@bug("rope", accepted=("rope",), words="theta|base", taps=ROTATED, layers=(1,), model="qwen3")
def theta_dropped_in_one_layer(p: Patched) -> None:
    p.frequencies(lambda inv: _base(1e4, 16), (1,))


@bug("rope", accepted=("rope",), words="theta|base|frequenc", taps=ROTATED, model="qwen3")
def theta_off_by_a_trifle(p: Patched) -> None:
    p.frequencies(lambda inv: _base(1.0005e6, 16))


@bug("rope", accepted=("rope",), words="scal|llama3|frequenc", taps=ROTATED, model="llama-llama3")
def llama3_scaling_ignored(p: Patched) -> None:
    p.frequencies(lambda inv: _base(5e5, 8))


@bug(
    "rope",
    accepted=("rope",),
    words="scal|factor|frequenc",
    taps=ROTATED,
    layers=(0, 1, 2),
    model="llama-llama3",
)
def llama3_factor_of_another_release(p: Patched) -> None:
    p.frequencies(lambda inv: inv.where(inv > _base(5e5, 8) * 0.2, inv / 4))


@bug("rope", accepted=("rope",), words="scal|yarn|frequenc|interpolat", taps=ROTATED, model="llama-yarn")
def yarn_frequencies_dropped(p: Patched) -> None:
    p.frequencies(lambda inv: _base(1e4, 8))


@bug("rope", accepted=("rope",), words="theta|base|NTK|scal|frequenc", taps=ROTATED, model="llama")
def ntk_base_at_short_lengths(p: Patched) -> None:
    p.frequencies(lambda inv: _base(1e4 * 4 ** (8 / 6), 8))


def _by_head(p, x, apply, cos_of, heads=None):
    """Each head of x [1, H, T, D] rotated by its own table."""
    turned = [apply(x[:, h : h + 1], x[:, h : h + 1], *cos_of(h))[0] for h in range(x.shape[1])]
    return torch.cat(turned, 1)


@bug(
    "rope",
    accepted=("rope", "positions"),
    words="head",
    taps=ROTATED,
    heads=tuple(range(1, 8)),
    model="qwen2-tied",
)
def position_plus_head(p: Patched) -> None:
    def rotate(apply, q, k, cos, sin):
        def table(h):
            return p.decoder.rotary_emb(q, torch.arange(p.past, p.past + p.new)[None] + h)

        return _by_head(p, q, apply, table), _by_head(p, k, apply, table)

    p.rotate(rotate)


@bug(
    "rope", accepted=("rope",), words="twice|2|double|two", taps=("attn.q_rope",), layers=(0,), model="qwen3"
)
def q_rotated_twice_in_the_first_layer(p: Patched) -> None:
    def rotate(apply, q, k, cos, sin):
        once, k = apply(q, k, cos, sin)
        return apply(once, once, cos, sin)[0], k

    p.rotate(rotate, (0,))


@bug(
    "rope",
    accepted=("rope",),
    words="frequenc|theta|base|exponent|spac",
    taps=ROTATED,
    layers=(2,),
    model="qwen3",
)
def frequencies_of_half_the_exponent(p: Patched) -> None:
    p.frequencies(lambda inv: 1 / 1e6 ** (torch.arange(8).float() / 16), (2,))


@bug(
    "rope",
    accepted=("rope", "precision"),
    words="round|precis|bfloat16|bf16|16",
    taps=ROTATED,
    model="llama-long",
)
def angles_in_bfloat16(p: Patched) -> None:
    def table(rotary, x, at):
        angles = (at[..., None].bfloat16() * rotary.inv_freq.bfloat16()).float()
        angles = torch.cat([angles, angles], -1)
        return angles.cos(), angles.sin()

    p.angles(table)


@bug("rope", accepted=("rope",), words="cos|sin|swap|exchang|quarter|90", taps=ROTATED, model="mistral-full")
def cos_and_sin_exchanged(p: Patched) -> None:
    p.rotate(lambda apply, q, k, cos, sin: apply(q, k, sin, cos))
