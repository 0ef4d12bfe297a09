"""Numbers that engines have in the place of a model's scale of scores, and the published slopes of ALiBi."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from lockstep.engine.config import ModelConfig
from lockstep.engine.config.rope_scaling import magnitude
from lockstep.workbench.diagnosis.operations.shares import head_offset
from lockstep.workbench.diagnosis.operations.site import Site


def right_scale(model: ModelConfig) -> str:
    """The model's own, in words: the number, and what it is the root of where it is one."""
    if (stated := model.score_scale) is None:
        times = " times the square of mscale_all_dim's factor" if stretch(model) != 1 else ""
        return f"{model.scale:.5g} = 1/sqrt(head_dim){times}"
    size = stated**-2 if stated > 0 else math.inf
    is_root = size < 1e6 and math.isclose(size, round(size), rel_tol=1e-6) and not (1 / stated).is_integer()
    return f"the configured {stated:.5g}" + (f" = 1/sqrt({size:.0f})" if is_root else "")


def stretch(model: ModelConfig) -> float:
    """YaRN's part of the scale, where keys are made from latents."""
    return model.scale * math.sqrt(model.head_dim) if model.latent is not None else 1.0


def _of_latents(model: ModelConfig) -> Iterator[tuple[float, str]]:
    """What may be mistaken in the scale of latent attention."""
    if (latent := model.latent) is None:
        return
    dim, own, scaling = model.head_dim, stretch(model), model.rope_scaling
    if own != 1:
        yield dim**-0.5, "the factor of mscale_all_dim is left out"
        yield own**2 * dim**-0.5, "the square of mscale_all_dim's factor is applied twice"
        yield own**0.5 * dim**-0.5, "mscale_all_dim's factor is applied once, not squared"
    if scaling.mscale and scaling.mscale != scaling.mscale_all_dim:
        by = magnitude(scaling.factor, scaling.mscale)
        yield by**2 * dim**-0.5, "the factor of mscale, which is the rotation's, instead of mscale_all_dim's"
    widths = {
        "the part of a key that is not rotated (qk_nope_head_dim)": latent.plain_dim,
        "a value (v_head_dim)": latent.value_dim,
        "the rotated part of a key": latent.rope_dim,
        "a latent": latent.kv_rank,
        "what is cached": latent.written_dim,
    }
    for words, size in widths.items():
        if size != dim:
            yield own * size**-0.5, f"by 1/sqrt of the width of {words}"
            if own != 1:
                yield size**-0.5, f"by 1/sqrt of the width of {words}, without the factor of mscale_all_dim"


def meanings(site: Site, right: float) -> Iterator[tuple[float, str]]:
    """What a wrong scale may stand for: (value, words)."""
    model, ranks, layer = site.facts.model, len(site.taps.ranks), site.layer or 0
    dim, heads, kv_heads, hidden = model.head_dim, model.num_heads, model.num_kv_heads, model.hidden_size
    yield 1.0, "the scale is missing"
    yield from _of_latents(model)
    if model.score_scale is not None and model.score_scale != dim**-0.5:
        yield dim**-0.5, "1/sqrt(head_dim), which is not this model's"
    yield 1 / dim, "scaled twice, by 1/head_dim"
    roots = [(hidden, "hidden_size"), (heads, "the number of heads"), (kv_heads, "the number of KV heads"),
             (dim // 2, "half of head_dim"), (2 * dim, "twice head_dim")]  # fmt: skip
    if hidden // heads != dim:
        roots.append((hidden // heads, "hidden_size / heads, which is not this model's head_dim"))
    if ranks > 1:
        roots += [(hidden // ranks, "a rank's share of hidden_size"), (heads // ranks, "a rank's number of heads"),
                  (dim // ranks, "head_dim over the ranks"), (dim * ranks, "head_dim times the ranks")]  # fmt: skip
    for size, words in roots:
        if size > 1 and size != dim:
            yield size**-0.5, f"by 1/sqrt of {words}"
    yield 1 / hidden, "by 1/hidden_size"
    yield dim**0.5, "multiplied by sqrt(head_dim) instead of divided"
    yield right * math.log2(math.e), "log2(e) is folded in as exp2 needs it, but exp follows"
    yield right * math.log(2), "ln(2) is folded in"
    yield -right, "the sign is turned"
    yield 0.0, "all scores are zero"
    divisors = [(layer + 1, "the layer's number"), (layer, "the layer's index"), (ranks, "the number of ranks"),
                (heads // kv_heads, "the number of queries a KV head serves")]  # fmt: skip
    for divisor, words in divisors:
        if divisor > 1:
            yield right / divisor, f"divided by {words} as well"
            yield right * divisor, f"multiplied by {words} as well"


def paper_slopes(site: Site, own: int) -> Sequence[float]:
    """The published slopes 2^(-8 h / n) of this rank's heads, of which it has `own`."""
    heads, first = site.facts.model.num_heads, head_offset(site)
    return [2.0 ** (-8 * (first + head + 1) / heads) for head in range(own)]
