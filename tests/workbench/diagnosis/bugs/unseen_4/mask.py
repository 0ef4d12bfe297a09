"""Who sees whom: the causal mask, the window, the length."""

from __future__ import annotations

import torch

from tests.workbench.diagnosis.bugs.bug import bug
from tests.workbench.diagnosis.bugs.patched import Patched


def _distance(allowed):
    """Of each key behind its query; negative for the future."""
    keys, queries = allowed.shape[-1], allowed.shape[-2]
    return torch.arange(keys - queries, keys)[:, None] - torch.arange(keys)


@bug(
    "mask",
    accepted=("mask",),
    words="window|distance|far|old|mask",
    taps=("attn.scores",),
    model="qwen2-untied",
)
def window_used_though_it_is_switched_off(p: Patched) -> None:
    """`sliding_window` is read and `use_sliding_window` is not."""
    p.attention(allow=lambda allowed: allowed & (_distance(allowed) < 8))


@bug("mask", accepted=("mask",), words="window", taps=("attn.scores",), model="mistral-window", tp=2)
def window_never_applied(p: Patched) -> None:
    p.attention(allow=lambda allowed: (_distance(allowed) >= 0).expand_as(allowed))


@bug("mask", accepted=("mask",), words="window", taps=("attn.scores",), model="mistral-window")
def window_one_too_wide(p: Patched) -> None:
    def allow(allowed):
        distance = _distance(allowed)
        return ((distance >= 0) & (distance <= 8)).expand_as(allowed)

    p.attention(allow=allow)


@bug(
    "mask",
    accepted=("mask",),
    words="mask|future|causal|bidirectional",
    taps=("attn.scores",),
    model="qwen2-tied",
    dtype="bfloat16",
)
def prefill_without_a_causal_mask(p: Patched) -> None:
    p.attention(allow=lambda allowed: allowed | True)


@bug(
    "mask",
    accepted=("mask", "cache"),
    words="256|length|mask|key|beyond|last",
    taps=("attn.scores",),
    model="llama-long",
)
def keys_beyond_256_are_never_seen(p: Patched) -> None:
    p.attention(allow=lambda allowed: allowed & (torch.arange(allowed.shape[-1]) < 256))


@bug(
    "mask",
    accepted=("mask",),
    words="mask|own|itself|last|new|current|rank|short",
    taps=("attn.scores",),
    ranks=(1,),
    step=1,
    model="llama",
    tp=2,
)
def rank_1_has_the_length_of_before_the_step(p: Patched) -> None:
    def allow(allowed):
        allowed = allowed.clone()
        if p.decode:
            allowed[..., -1] = False
        return allowed

    if p.rank == 1:
        p.attention(allow=allow)


@bug(
    "mask",
    accepted=("mask",),
    words="mask|future|causal|tile|block",
    taps=("attn.scores",),
    layers=(0, 1, 2),
    model="llama-bias",
)
def only_the_first_tile_of_queries_is_masked(p: Patched) -> None:
    """Tiles of eight queries, of which the causal test knows the first alone."""

    def allow(allowed):
        late = (torch.arange(allowed.shape[-2]) >= 8)[:, None]
        return allowed | late

    p.attention(allow=allow)
