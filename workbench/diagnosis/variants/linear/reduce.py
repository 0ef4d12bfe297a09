"""Variants of the sum over the ranks' partial products, and of the bias that is added to it once."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from lockstep.engine.graph import MULTIPLIED
from lockstep.engine.graph.formula import product
from lockstep.workbench.diagnosis.hypotheses.fits import least_squares
from lockstep.workbench.diagnosis.hypotheses.variant import Variant
from lockstep.workbench.diagnosis.operations.shares import rank_spans
from lockstep.workbench.diagnosis.operations.site import Site
from lockstep.workbench.diagnosis.recording import Array


def summed(site: Site) -> Iterator[Variant]:
    """The ranks' partials and the bias count other times than once each: fitted together, then read as whole numbers
    or shares of the ranks."""
    part, deviation = site.parts[0], site.deviation
    if deviation is None or not part.fits or not np.isfinite(part.seen).all():
        return
    partials = part.inputs["partial"]
    bias = site.facts.vector(site.weights["bias"]) if "bias" in site.weights else None
    terms = [*partials, *([] if bias is None or not bias.any() else [np.broadcast_to(bias, part.seen.shape)])]
    scope = deviation.scopes[0]
    design = np.stack([term[scope] for term in terms], axis=1)
    if len(design) < 4 * len(terms) or not np.isfinite(design).all():
        return
    by = least_squares(design, part.seen[scope])
    ranks = len(partials)
    near = [_well_known(float(x), ranks) for x in by]
    predicted = np.tensordot(np.array(near), np.stack(terms), 1)
    counts, biased = near[:ranks], near[ranks] if len(near) > ranks else 1.0
    for name, text in _names(site, counts, biased):
        fitted = {"times": counts, "bias": biased if bias is not None else None, "ranks": ranks}
        kind = "bias" if name.startswith("bias") else "reduce"
        yield Variant(name, kind, text, fitted, predicted)
        return
    plain = np.tensordot(by, np.stack(terms), 1)
    told = ", ".join(f"{x:.7g}" for x in by[:ranks])
    yield Variant("summed_wrongly", "reduce", f"the ranks' partial products count {told} times in the sum",
                  {"times": by.tolist()}, plain, len(by))  # fmt: skip


def summed_products(site: Site) -> Iterator[Variant]:
    """The same of a product over all ranks' inputs, of which no partial was recorded: each is computed from its rank's
    columns."""
    part, name = site.parts[0], MULTIPLIED.get(site.kind)
    weight = site.facts.weight(site.weights["weight"])
    if name is None or len(site.taps.ranks) < 2 or weight is None:
        return
    partials = []
    for rank in site.taps.ranks:
        x = site.rows_of(site.near(name), rank)
        _, columns = rank_spans(f"{site.tap}.partial", "linear", rank, site.taps, site.facts)
        own = weight if columns is None else weight[:, columns]
        if x is None or x.ndim != 2 or x.shape[1] != own.shape[1]:
            return
        partials.append(product(x, own))
    inputs = {"partial": np.stack(partials)}
    yield from summed(replace(site, operation="reduce", parts=(replace(part, inputs=inputs),)))


def _well_known(by: float, ranks: int) -> float:
    """The whole number or share of the ranks that a fitted count stands for; itself where it is near none."""
    known = [*range(-1, ranks + 3), 1 / ranks, 0.5]
    nearest = min(known, key=lambda value: abs(value - by))
    return float(nearest) if abs(nearest - by) < 0.02 else by


def _names(site: Site, counts: list[float], bias: float) -> Iterator[tuple[str, str]]:
    """Name and sentence of a pattern of counts; nothing for one without a name."""
    ranks, name = len(counts), site.weights.get("bias", "the bias")
    whole = len(set(counts)) == 1
    added = "" if bias == 1 else f"; {name} counts {bias:g} times"
    if whole and counts[0] == 1:
        if bias == 0:
            yield "bias_dropped", f"{name} is not added"
        elif bias == ranks and ranks > 1:
            yield "bias_on_every_rank", f"{name} is added by every rank before the sum: {ranks} times"
        elif bias != 1:
            yield "bias_repeated", f"{name} is added {bias:g} times"
    elif whole and ranks > 1 and counts[0] in (2, ranks):
        yield (
            "reduce_repeated",
            f"the product is {counts[0]:g} times what it should be: summed twice over the ranks{added}",
        )
    elif whole and ranks > 1 and np.isclose(counts[0], 1 / ranks):
        yield (
            "reduce_averaged",
            f"the product is 1/{ranks} of what it should be: averaged over the ranks, not summed{added}",
        )
    elif whole and counts[0] == 0:
        yield "product_missing", f"the product is left out: nothing but the bias comes out{added}"
    elif sorted(counts) == [*([0.0] * (ranks - 1)), 1.0]:
        only = counts.index(1.0)
        others = [str(rank) for rank in range(ranks) if rank != only]
        if len(site.ranks) > 1:  # whoever shares their sum does not go on with a partial of his own
            text = f"the partial of rank {', '.join(others)} is missing from the sum{added}"
            yield "rank_missing", text
        elif only == site.rank:
            yield "not_reduced", f"no sum over the ranks: rank {only} goes on with its own partial{added}"
        else:
            yield (
                "one_partial",
                f"rank {site.rank} has rank {only}'s partial instead of the sum over the ranks{added}",
            )
    elif set(counts) == {0.0, 1.0}:
        lost = [str(rank) for rank, count in enumerate(counts) if count == 0]
        yield "rank_missing", f"the partial of rank {', '.join(lost)} is missing from the sum{added}"
    elif set(counts) == {1.0, 2.0}:
        more = [str(rank) for rank, count in enumerate(counts) if count == 2]
        yield "rank_repeated", f"the partial of rank {', '.join(more)} counts twice in the sum{added}"


def with_stream(site: Site) -> Iterator[Variant]:
    """The residual stream is in the sum, so many times: ranks have added it before they reduced."""
    part, deviation = site.parts[0], site.deviation
    stream = site.rows_of(site.near("<" if site.kind == "attn.o_proj" else "attn_residual"))
    if site.kind not in MULTIPLIED or deviation is None or stream is None or stream.shape != part.seen.shape:
        return
    scope = deviation.scopes[0]
    power = float((stream[scope] ** 2).sum())
    share = float(((part.seen - part.expected)[scope] * stream[scope]).sum()) / power if power else 0.0
    times = round(share) if np.isfinite(share) else 0
    if times:
        text = f"the residual stream is in the sum over the ranks: {times} times"
        yield Variant("residual_in_sum", "residual", text, {"times": times}, part.expected + times * stream)


def other_bias(site: Site) -> Iterator[Variant]:
    """The bias is another one, or something constant is added that is none."""
    part, deviation = site.parts[0], site.deviation
    if deviation is None or not part.fits or not np.isfinite(part.seen).all():
        return
    total = part.inputs["partial"].sum(0)
    own = site.weights.get("bias", "")
    model = site.facts.model
    for (how, words), read in site.facts.misread(own) if own else ():
        yield Variant(
            "misread", "weight", f"{own} is misread: {words}", {"tensor": own, "how": how}, total + read
        )
    for layer in range(model.num_layers):
        for module in ("self_attn.o_proj", "mlp.down_proj"):
            name = f"model.layers.{layer}.{module}.bias"
            vector = site.facts.vector(name) if name != own and (model.o_bias or model.mlp_bias) else None
            if vector is not None and vector.shape == total.shape[1:]:
                yield Variant("bias_of_another", "bias", f"{name} is added instead of {own or 'nothing'}",
                              {"bias": own, "is": name}, total + vector)  # fmt: skip
    rows = np.flatnonzero(deviation.scopes[0].any(1))
    if len(rows) >= 4:
        row: Array = (part.seen - part.expected)[rows].mean(0)
        yield Variant("constant_row", "bias", "every token is off by the same vector, as by a wrong bias",
                      {"norm": float(np.linalg.norm(row))}, part.expected + row, len(row))  # fmt: skip
