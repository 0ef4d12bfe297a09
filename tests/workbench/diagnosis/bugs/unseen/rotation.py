"""Rotations: frequencies, positions, pairs, and which heads are rotated."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from tests.workbench.diagnosis.bugs.bug import ROTATED, bug
from tests.workbench.diagnosis.bugs.patched import Patched

FREQUENCIES = "frequenc|theta|base|scal|angle"


def _inverse(base: float, dim: int) -> Tensor:
    return base ** -(torch.arange(0, dim, 2) / dim)


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The pairs (i, i + D/2) of x [..., D] turned."""
    left, right = x.chunk(2, -1)
    return x * cos + torch.cat((-right, left), -1) * sin


@bug("rope", accepted=("rope",), words=FREQUENCIES, taps=ROTATED, layers=(1,), model="qwen2-tied")
def one_layer_has_the_theta_of_local_attention(p: Patched) -> None:
    p.frequencies(lambda inv: _inverse(1e4, 8), (1,))


@bug(
    "rope",
    accepted=("rope", "norm"),
    words="rotat|rope|order|norm|before",
    taps=("attn.q_norm", "attn.k_norm"),
    model="qwen3",
)
def rotated_before_the_norm(p: Patched) -> None:
    p.rotate(lambda apply, q, k, cos, sin: (q, k))
    for _, layer in p.layers():
        attn = layer.self_attn

        def around(forward: Any, attn: Any = attn, **kwargs: Any) -> Any:
            attn.table = [one.unsqueeze(2) for one in kwargs["position_embeddings"]]
            return forward(**kwargs)

        p.wrap(attn, around)
        for norm in (attn.q_norm, attn.k_norm):
            p.wrap(norm, lambda forward, x, attn=attn: forward(_rotated(x, *attn.table)))


@bug("rope", accepted=("positions",), words="position|offset", taps=ROTATED, step=1, model="llama")
def decode_takes_the_position_of_the_first_sequence(p: Patched) -> None:
    def change(positions: Tensor) -> Tensor:
        lengths = p.model.prompt_lengths
        return positions + (lengths[0] - lengths[p.seq]) * p.decode

    p.positions(change)


@bug("rope", accepted=("positions",), words="position|offset", taps=ROTATED, step=1, model="qwen3")
def decode_counts_on_from_the_padded_prompt(p: Patched) -> None:
    """The prompt was padded on its right to a bucket of 16."""
    p.positions(lambda positions: positions + (-p.model.prompt_lengths[p.seq] % 16) * p.decode)


@bug(
    "rope",
    accepted=("precision", "rope"),
    words="precision|bf16|float16|round",
    taps=ROTATED,
    model="llama",
)
def table_of_cosines_kept_in_bfloat16(p: Patched) -> None:
    def table(rotary: Any, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        cos, sin = rotary(x, positions)
        return cos.bfloat16().to(x.dtype), sin.bfloat16().to(x.dtype)

    p.angles(table)


@bug("rope", accepted=("rope",), words=FREQUENCIES, taps=ROTATED, model="llama-yarn")
def yarn_divides_all_frequencies(p: Patched) -> None:
    p.frequencies(lambda inv: _inverse(1e4, 8) / 8)


@bug("rope", accepted=("rope",), words=FREQUENCIES, taps=ROTATED, model="llama-llama3")
def llama3_bands_from_the_extended_context(p: Patched) -> None:
    config = copy.deepcopy(p.model.config)
    config.rope_parameters["original_max_position_embeddings"] = config.max_position_embeddings
    inverse, _ = ROPE_INIT_FUNCTIONS["llama3"](config)
    p.frequencies(lambda inv: inverse)


@bug("rope", accepted=("rope", "positions"), words=FREQUENCIES, taps=ROTATED, step=1, model="llama-linear")
def decode_kernel_does_not_know_the_linear_factor(p: Patched) -> None:
    p.frequencies(lambda inv: inv * 4 if p.decode else inv)


@bug("rope", accepted=("rope",), words="interleav|pair|frequenc|angle", taps=ROTATED, model="qwen2-tied")
def table_made_for_neighbours_applied_to_halves(p: Patched) -> None:
    """Each angle stands twice in a row, as GPT-J has it, and rotate_half turns the pairs (i, i + D/2)."""

    def table(rotary: Any, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        cos, sin = rotary(x, positions)
        return cos[..., :4].repeat_interleave(2, -1), sin[..., :4].repeat_interleave(2, -1)

    p.angles(table)


@bug(
    "rope",
    accepted=("rope", "heads"),
    words="head|not rotated|without",
    taps=ROTATED,
    heads=tuple(range(1, 8)),
    model="llama",
)
def grid_of_one_block_rotates_one_head(p: Patched) -> None:
    def rotate(apply: Any, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        first = [one[:, :1] for one in apply(q, k, cos, sin)]
        return torch.cat((first[0], q[:, 1:]), 1), torch.cat((first[1], k[:, 1:]), 1)

    p.rotate(rotate)


@bug(
    "rope",
    accepted=("rope",),
    words="rotat|rope|head",
    taps=("attn.k_rope",),
    heads=(3,),
    model="llama",
)
def loop_over_kv_heads_leaves_the_last_unrotated(p: Patched) -> None:
    def rotate(apply: Any, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        q, turned = apply(q, k, cos, sin)
        return q, torch.cat((turned[:, :3], k[:, 3:]), 1)

    p.rotate(rotate)


@bug(
    "rope",
    accepted=("rope",),
    words="partial|dim|half|first|pair|frequenc",
    taps=ROTATED,
    model="qwen3",
)
def rotary_width_is_hidden_over_heads(p: Patched) -> None:
    """8 of the 16 dimensions that the configuration gives a head."""

    def rotate(apply: Any, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        angles = torch.arange(p.past, p.past + p.new)[:, None] * _inverse(1e6, 8)
        angles = torch.cat((angles, angles), -1)
        cos, sin = angles.cos(), angles.sin()
        turned = [torch.cat((_rotated(x[..., :8], cos, sin), x[..., 8:]), -1) for x in (q, k)]
        return turned[0], turned[1]

    p.rotate(rotate)


@bug("rope", accepted=("rope",), words=FREQUENCIES, taps=ROTATED, model="qwen2-untied")
def frequencies_by_linspace_to_the_base_itself(p: Patched) -> None:
    p.frequencies(lambda inv: 1e6 ** -torch.linspace(0, 1, 4))


@bug("rope", accepted=("rope",), words=FREQUENCIES, taps=ROTATED, step=1, model="llama")
def dynamic_base_grows_with_each_decode_step(p: Patched) -> None:
    def change(inv: Tensor) -> Tensor:
        length = p.past + 1
        return _inverse(1e4 * (2 * length / p.model.prompt_lengths[p.seq] - 1) ** (8 / 6), 8)

    p.frequencies(lambda inv: change(inv) if p.decode else inv)


@bug(
    "rope",
    accepted=("positions", "rope"),
    words="position|wrap|table|modul|offset",
    taps=ROTATED,
    step=4,
    model="qwen3",
)
def positions_begin_again_after_the_sixteenth(p: Patched) -> None:
    p.positions(lambda positions: positions % 16)
