"""With which weight a norm was taken: told by the columns' factors."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from lockstep.workbench.diagnosis.operations.facts import Facts
from lockstep.workbench.diagnosis.operations.shares import whose
from lockstep.workbench.diagnosis.operations.site import Site
from lockstep.workbench.diagnosis.recording import Array
from lockstep.workbench.diagnosis.variants.fits import Mask, apart, factor
from lockstep.workbench.diagnosis.variants.variant import Variant

_BLOCK = ("input_layernorm", "post_attention_layernorm")
_HEADS = ("self_attn.q_norm", "self_attn.k_norm")


def weight_variants(site: Site, normed: Array, weight: Array, wrong: Mask) -> Iterator[Variant]:
    """The weights of the checkpoint, and what may be made of them, that give what was seen of the normalised input."""
    used, name = _used(site, normed, wrong), site.weights["weight"]
    for cause, text, candidate in _candidates(site, weight):
        if apart(used, candidate) < 0.3:
            fitted: dict[str, object] = {"weight": name, "is": text.format("the weight")}
            yield Variant(cause, "norm", text.format(name), fitted, normed * candidate)
    for other in _other_names(site):
        found, (of, norm) = site.facts.vector(other), whose(other, site.layer)
        if found is None or found.shape != weight.shape or np.array_equal(found, weight):
            continue
        for words, candidate in (("", found), (", as 1 + w", 1 + found)):
            if apart(used, candidate) < 0.3:
                text = f"{norm} of {of} is used instead of {name}{words}"
                fitted = {"weight": name, "is": other, "of": of}
                # The same tensor of another layer is a mistake of loading, whatever the tensor.
                kind = "weight" if norm == whose(name, site.layer)[1] and not words else "norm"
                yield Variant("norm_weight_of_other", kind, text, fitted, normed * candidate)


def fitted_weight(site: Site, normed: Array, weight: Array, wrong: Mask) -> Iterator[Variant]:
    """The weight that the columns tell; where only some channels are wrong, which, and by how much."""
    yield from _single_channels(site, normed, weight, wrong)
    if wrong.sum() * (normed.size // len(normed) // len(weight)) >= 4:
        used = _used(site, normed, wrong)
        text = f"each channel is off by a factor of its own: the weight is not {site.weights['weight']}"
        ratio = used / np.where(weight == 0, 1, weight)
        fitted = {"least": float(ratio.min()), "most": float(ratio.max())}
        yield Variant("channel_factor", "norm", text, fitted, normed * used, len(weight))


def _single_channels(site: Site, normed: Array, weight: Array, wrong: Mask) -> Iterator[Variant]:
    if site.deviation is None:
        return
    scope = site.deviation.scopes[0]
    channels = np.flatnonzero(scope.any(tuple(range(scope.ndim - 1))))
    if not 0 < len(channels) <= max(1, len(weight) // 4):
        return
    used, name = weight.copy(), site.weights["weight"]
    used[channels] = _used(site, normed, wrong)[channels]
    told = ", ".join(f"{i} is {used[i]:.5g} instead of {weight[i]:.5g}" for i in channels[:4].tolist())
    more = f", {len(channels) - 4} more" if len(channels) > 4 else ""
    yield Variant("norm_weight_elements", "norm", f"single channels of {name} differ: {told}{more}",
                  {"weight": name, "channels": channels[:64].tolist()}, normed * used, len(channels))  # fmt: skip


def _used(site: Site, normed: Array, wrong: Mask) -> Array:
    axes = tuple(range(normed.ndim - 1))
    return factor(site.seen[wrong], normed[wrong], axes).reshape(-1)


def _candidates(site: Site, weight: Array) -> Iterator[tuple[str, str, Array]]:
    yield "norm_weight_missing", "{} is not applied", np.ones_like(weight)
    yield "norm_plus_one", "{} is applied as 1 + w", 1 + weight
    yield "norm_minus_one", "{} is applied as w - 1", weight - 1
    yield "norm_weight_squared", "{} is applied twice", weight**2
    yield "norm_weight_inverted", "{} is divided by", 1 / np.where(weight == 0, 1, weight)
    half = len(weight) // 2
    if len(weight) % 2 == 0:
        halves = {
            "{}'s first half is used for both": np.tile(weight[:half], 2),
            "{}'s second half is used for both": np.tile(weight[half:], 2),
            "{} is read as neighbouring pairs": np.concatenate([weight[::2], weight[1::2]]),
            "{} is read as halves": np.stack([weight[:half], weight[half:]], axis=1).reshape(-1),
        }
        for text, candidate in halves.items():
            yield "norm_weight_moved", text, candidate
    yield "norm_weight_moved", "{} is read backwards", weight[::-1]


def _other_names(site: Site) -> Iterator[str]:
    kinds = _HEADS if site.kind in ("attn.q_norm", "attn.k_norm") else _BLOCK
    names = [f"model.layers.{i}.{kind}.weight" for i in _layers(site.facts, site.layer) for kind in kinds]
    yield from (name for name in [*names, "model.norm.weight"] if name != site.weights["weight"])


def _layers(facts: Facts, own: int | None) -> list[int]:
    """All layers, the nearest first."""
    at = facts.model.num_layers if own is None else own
    return sorted(range(facts.model.num_layers), key=lambda layer: abs(layer - at))
