"""Rotations: positions, tables, frequencies, the turning itself."""

from __future__ import annotations

import copy

import torch

from tests.workbench.diagnosis.bugs.bug import ROTATED, bug
from tests.workbench.diagnosis.bugs.patched import Patched


def _halves(x):
    return x.chunk(2, -1)


@bug(
    "rope",
    accepted=("rope", "positions"),
    words="position|angle|frequenc|pair|rotat",
    taps=ROTATED,
    model="qwen3",
)
def text_takes_the_grid_positions_of_an_image(p: Patched) -> None:
    """Half of the pairs turn by time, a quarter by the row and a quarter by the column of a grid four wide."""

    def table(rotary, x, at):
        rows = [at] * 4 + [at // 4] * 2 + [at % 4] * 2
        angles = torch.stack(rows, -1).float() * rotary.inv_freq
        angles = torch.cat([angles, angles], -1)
        return angles.cos().to(x.dtype), angles.sin().to(x.dtype)

    p.angles(table)


@bug(
    "rope",
    accepted=("rope", "overflow"),
    words="theta|base|frequenc|pair|rotat|angle",
    taps=ROTATED,
    model="qwen2-untied",
    tp=2,
)
def base_overflows_in_half_precision(p: Patched) -> None:
    """A million is infinite there: all but the first pair stand still."""
    p.frequencies(lambda inv: torch.cat([inv[:1], torch.zeros_like(inv[1:])]))


@bug(
    "rope",
    accepted=("positions", "rope"),
    words="position|shift|ahead|far",
    taps=ROTATED,
    model="llama-linear",
)
def cached_prefix_counted_twice_in_the_positions_of_the_rest(p: Patched) -> None:
    """Four tokens of the second prompt were found in the cache."""

    def moved(at):
        return at + 4 * (at >= 4) if p.seq == 1 and not p.decode else at

    p.positions(moved)


@bug(
    "rope",
    accepted=("rope",),
    words="rotat|half|sin|angle|pair",
    taps=ROTATED,
    layers=(1,),
    model="mistral-window",
    dtype="bfloat16",
)
def product_with_sin_forgets_to_rotate_half(p: Patched) -> None:
    def rotate(apply, q, k, cos, sin):
        cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
        return tuple(x * cos + x * sin for x in (q, k))

    p.rotate(rotate, (1,))


@bug(
    "rope",
    accepted=("rope",),
    words="rotat|half|sin|angle|pair",
    taps=ROTATED,
    model="llama",
    dtype="bfloat16",
)
def second_half_reads_the_first_already_rotated(p: Patched) -> None:
    """The kernel writes in place."""

    def rotate(apply, q, k, cos, sin):
        cos, sin = _halves(cos.unsqueeze(1))[0], _halves(sin.unsqueeze(1))[0]
        turned = []
        for x in (q, k):
            first, second = _halves(x)
            first = first * cos - second * sin
            turned.append(torch.cat([first, second * cos + first * sin], -1))
        return tuple(turned)

    p.rotate(rotate)


@bug(
    "rope",
    accepted=("rope", "positions", "heads"),
    words="head|position|angle|rotat",
    taps=ROTATED,
    model="llama",
    tp=2,
)
def table_read_along_the_heads(p: Patched) -> None:
    """[batch, heads, tokens, dim] handed to a kernel of [batch, tokens, heads, dim]."""
    rotary = copy.deepcopy(p.decoder.rotary_emb)

    def rotate(apply, q, k, cos, sin):
        turned = []
        for x in (q, k):
            by_head = rotary(x, torch.arange(x.shape[1])[None])
            swapped, _ = apply(x.transpose(1, 2), x.transpose(1, 2), *by_head)
            turned.append(swapped.transpose(1, 2))
        return tuple(turned)

    p.rotate(rotate)


@bug(
    "rope",
    accepted=("cache", "rope", "positions"),
    words="rotat|angle|position|shift|turn|key",
    taps=("attn.k_cache",),
    step=2,
    model="llama-mha",
)
def cached_keys_turned_for_a_shift_that_did_not_happen(p: Patched) -> None:
    """Room was to be made in the context: the keys of the prompt are turned back by two positions, and stay there."""
    rotary = p.decoder.rotary_emb

    def read(k, v):
        if p.step < 2:
            return k, v
        angles = -2 * rotary.inv_freq
        cos, sin = angles.cos(), angles.sin()
        prompt = p.model.prompt_lengths[p.seq]
        first, second = _halves(k[:, :, :prompt])
        old = torch.cat([first * cos - second * sin, second * cos + first * sin], -1)
        return torch.cat([old, k[:, :, prompt:]], 2), v

    p.cache(read=read)


@bug(
    "rope",
    accepted=("rope", "precision"),
    words="angle|precision|round|low|rotat|sin|frequenc",
    taps=ROTATED,
    model="llama-long",
)
def whole_turns_taken_off_with_a_rounded_pi(p: Patched) -> None:
    """Pi in float16: the more turns, the more is missing."""

    def table(rotary, x, at):
        angles = (at[..., None].float() * rotary.inv_freq) % (2 * 3.140625)
        angles = torch.cat([angles, angles], -1)
        return angles.cos(), angles.sin()

    p.angles(table)
