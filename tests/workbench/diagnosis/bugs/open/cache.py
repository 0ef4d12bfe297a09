"""Cache rows: scaled, foreign, shifted, rounded, of another length."""

from __future__ import annotations

from tests.workbench.diagnosis.bugs.bug import CACHES, bug
from tests.workbench.diagnosis.bugs.patched import Patched


def _in_decode(p, change):
    return lambda k, v: change(k, v) if p.decode else (k, v)


@bug(
    "cache",
    accepted=("cache", "precision"),
    words="round|precis|int8|8.bit|quant",
    taps=("attn.k_cache",),
    layers=(2,),
    model="mistral-full",
)
def keys_quantised_by_token(p: Patched) -> None:
    def written(k, v):
        step = k.abs().amax(-1, keepdim=True) / 127
        return (k / step).round() * step, v

    p.cache((2,), written=written)


@bug(
    "cache",
    accepted=("cache", "positions"),
    words="shift|slot|row|order|offset",
    taps=CACHES,
    step=1,
    model="qwen2-untied",
)
def rows_shifted_by_a_slot(p: Patched) -> None:
    def read(k, v):
        old = slice(0, p.past)
        k, v = k.clone(), v.clone()
        k[:, :, old], v[:, :, old] = k[:, :, old].roll(1, 2), v[:, :, old].roll(1, 2)
        return k, v

    p.cache(read=_in_decode(p, read))


@bug(
    "cache",
    accepted=("cache", "positions"),
    words="shift|slot|row|order|offset|V|value",
    taps=("attn.v_cache",),
    step=1,
    layers=(1,),
    model="llama",
)
def values_shifted_in_one_layer(p: Patched) -> None:
    p.cache((1,), read=_in_decode(p, lambda k, v: (k, v.roll(1, 2))))


@bug("cache", accepted=("cache",), words="layer", taps=CACHES, step=1, layers=(2,), model="llama")
def cache_of_the_layer_before(p: Patched) -> None:
    def read(k, v):
        other = p.caches[p.seq].layers[1]
        k, v = k.clone(), v.clone()
        k[:, :, : p.past], v[:, :, : p.past] = other.keys[:, :, : p.past], other.values[:, :, : p.past]
        return k, v

    p.cache((2,), read=_in_decode(p, read))


@bug(
    "cache",
    accepted=("cache", "rope"),
    words="before|unrotated|not rotated|RoPE|rotat",
    taps=("attn.k_cache",),
    layers=(1,),
    model="qwen2-tied",
)
def keys_stored_before_their_rotation(p: Patched) -> None:
    held = {}
    p.rotate(lambda apply, q, k, cos, sin: held.update(k=k) or apply(q, k, cos, sin), (1,))
    p.cache((1,), written=lambda k, v: (held["k"], v))


@bug(
    "cache",
    accepted=("cache",),
    words="current|new|own|written|row|zero|stale|missing",
    taps=CACHES,
    step=1,
    model="llama",
)
def the_new_row_is_written_too_late(p: Patched) -> None:
    def read(k, v):
        k, v = k.clone(), v.clone()
        k[:, :, -1], v[:, :, -1] = 0, 0
        return k, v

    p.cache(read=_in_decode(p, read))


@bug(
    "cache",
    accepted=("cache",),
    words="swap|exchang|K|V|value|key",
    taps=CACHES,
    step=1,
    layers=(0,),
    model="llama-mha",
)
def k_and_v_exchanged_in_decode(p: Patched) -> None:
    p.cache((0,), read=_in_decode(p, lambda k, v: (v, k)))


@bug(
    "cache",
    accepted=("cache", "heads"),
    words="head",
    taps=CACHES,
    heads=(1,),
    step=1,
    layers=(1,),
    model="qwen2-tied",
)
def one_kv_head_s_rows_are_another_s(p: Patched) -> None:
    def read(k, v):
        k, v = k.clone(), v.clone()
        k[:, 1, : p.past], v[:, 1, : p.past] = k[:, 0, : p.past], v[:, 0, : p.past]
        return k, v

    p.cache((1,), read=_in_decode(p, read))
