"""Numbers that engines have in the place of a model's scale of scores, and the published slopes of ALiBi."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from lockstep.engine.config import ModelConfig
from lockstep.workbench.diagnosis.operations.shares import head_offset
from lockstep.workbench.diagnosis.operations.site import Site


def right_scale(model: ModelConfig) -> str:
    """The model's own, in words."""
    whose = "1/sqrt(head_dim)" if model.score_scale is None else "the model's own"
    return f"{model.scale:.5g} = {whose}"


def meanings(site: Site, right: float) -> Iterator[tuple[float, str]]:
    """What a wrong scale may stand for: (value, words)."""
    model, ranks, layer = site.facts.model, len(site.taps.ranks), site.layer or 0
    dim, heads, kv_heads, hidden = model.head_dim, model.num_heads, model.num_kv_heads, model.hidden_size
    yield 1.0, "the scale is missing"
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
