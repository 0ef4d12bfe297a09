"""Rotation: the base, its scaling, the pairs, the positions."""

from __future__ import annotations

import copy

import torch

from tests.workbench.diagnosis.bugs.bug import ROTATED, bug
from tests.workbench.diagnosis.bugs.patched import Patched


def _inverse(theta, dim):
    return 1 / theta ** (torch.arange(0, dim, 2).float() / dim)


@bug("rope", accepted=("rope",), words="theta|base|frequenc", taps=ROTATED, model="qwen3-bias", tp=2)
def theta_left_at_its_default(p: Patched) -> None:
    p.frequencies(lambda inv: _inverse(1e4, 16))


@bug(
    "rope",
    accepted=("rope",),
    words="interleav|neighbour|adjacent|pairs|halves",
    taps=ROTATED,
    model="mistral-full",
    dtype="bfloat16",
)
def neighbours_rotated_as_pairs_everywhere(p: Patched) -> None:
    def rotate(apply, q, k, cos, sin):
        def turn(x):
            c, s = (y[:, None, :, : y.shape[-1] // 2] for y in (cos, sin))
            one, two = x[..., ::2], x[..., 1::2]
            return torch.stack([one * c - two * s, two * c + one * s], -1).flatten(-2)

        return turn(q), turn(k)

    p.rotate(rotate)


@bug(
    "rope",
    accepted=("positions", "rope"),
    words="position",
    taps=ROTATED,
    ranks=(0,),
    step=2,
    model="llama",
    tp=4,
)
def positions_of_rank_0_stop_after_one_decoded_token(p: Patched) -> None:
    if p.rank == 0:
        p.positions(lambda at: at.clamp(max=p.model.prompt_lengths[p.seq]))


@bug(
    "rope",
    accepted=("rope", "positions"),
    words="scal|factor|frequenc|position|times|linear",
    taps=ROTATED,
    model="llama-linear",
)
def linear_factor_multiplies_the_positions(p: Patched) -> None:
    """The factor of 4 the wrong way round."""
    p.frequencies(lambda inv: inv * 16)


@bug(
    "rope",
    accepted=("rope",),
    words="scal|llama3|frequenc",
    taps=ROTATED,
    step=1,
    model="llama-llama3",
)
def decode_kernel_knows_no_llama3_scaling(p: Patched) -> None:
    p.frequencies(lambda inv: _inverse(5e5, 8) if p.decode else inv)


@bug(
    "rope",
    accepted=("rope", "scale"),
    words="yarn|factor|mscale|scal|times|twice|magnitude|length",
    taps=ROTATED,
    model="llama-yarn",
)
def yarn_attention_factor_applied_twice(p: Patched) -> None:
    p.frequencies(lambda inv: inv, factor=p.decoder.rotary_emb.attention_scaling**2)


@bug(
    "rope",
    accepted=("rope",),
    words="yarn|scal|frequenc|interpolat|context|ramp",
    taps=ROTATED,
    model="llama-yarn",
)
def yarn_ramp_of_the_extended_context(p: Patched) -> None:
    """The second pair lies half way on the ramp that 256 positions give; 32 give none."""
    plain = _inverse(1e4, 8)
    kept = torch.tensor([1.0, 0.5, 0.0, 0.0])
    p.frequencies(lambda inv: plain * kept + plain / 8 * (1 - kept))


@bug(
    "rope",
    accepted=("rope", "positions"),
    words="theta|base|frequenc|scal|position|256|beyond|long",
    taps=ROTATED,
    model="llama-long",
)
def longer_contexts_turn_by_another_base_from_there_on(p: Patched) -> None:
    """The factors for long contexts begin at 256, and the keys before keep the short ones."""

    def table(rotary, x, at):
        wrong = copy.deepcopy(rotary)
        wrong.inv_freq = _inverse(4e4, 8)
        far = (at >= 256)[..., None]
        return tuple(
            torch.where(far, other, own) for other, own in zip(wrong(x, at), rotary(x, at), strict=True)
        )

    p.angles(table)


@bug(
    "rope",
    accepted=("rope", "precision"),
    words="frequenc|round|precis|bfloat16|bf16|16|theta|base",
    taps=ROTATED,
    model="llama-long",
)
def inverse_frequencies_cast_with_the_model(p: Patched) -> None:
    p.frequencies(lambda inv: inv.bfloat16().float())


@bug(
    "rope",
    accepted=("rope",),
    words="scal|llama3|frequenc|rank",
    taps=ROTATED,
    ranks=(2,),
    model="llama-llama3",
    tp=4,
)
def rank_2_has_no_llama3_scaling(p: Patched) -> None:
    if p.rank == 2:
        p.frequencies(lambda inv: _inverse(5e5, 8))
