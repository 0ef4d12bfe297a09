"""Hypotheses about norm, residual sum and activation: edits of their formulas.

for variant in row_edits(site): ...      # a bank, as `diagnosis.search` takes them
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Any

import numpy as np

from lockstep.engine.graph import LAYER, final_norm_of, operations_of
from lockstep.engine.graph.formula import eps_of, numbers_of, silu
from lockstep.engine.parallel.shards import LAYER_SCALAR
from lockstep.engine.taps.flow import near
from lockstep.engine.taps.names import operation_at
from lockstep.workbench.diagnosis.hypotheses.edits import Detail, Edit, leaves, together
from lockstep.workbench.diagnosis.hypotheses.fits import narrower
from lockstep.workbench.diagnosis.hypotheses.generate import Choices, edits_of
from lockstep.workbench.diagnosis.hypotheses.maps import (
    columns_paired,
    factors_of_terms,
    free_maps_of,
    maps_of,
    rows_of_terms,
)
from lockstep.workbench.diagnosis.hypotheses.operands import (
    BEHIND_KEY,
    FIRST_PART,
    OWN_PART,
    READER,
    WITH_KEY,
    formula_at,
    moved_name,
    norm_vectors,
    operand_name,
    recorded,
)
from lockstep.workbench.diagnosis.hypotheses.packs import by_own_width
from lockstep.workbench.diagnosis.hypotheses.products.products import own_trial_of, wording_of
from lockstep.workbench.diagnosis.hypotheses.products.products import trial_of as product_trial
from lockstep.workbench.diagnosis.hypotheses.products.words import PRODUCTS
from lockstep.workbench.diagnosis.hypotheses.search import pairs, single
from lockstep.workbench.diagnosis.hypotheses.solve import Solved, solve
from lockstep.workbench.diagnosis.hypotheses.trial import Lazy, Load, RowTrial
from lockstep.workbench.diagnosis.hypotheses.variant import Variant
from lockstep.workbench.diagnosis.hypotheses.words import wording
from lockstep.workbench.diagnosis.operations.layers import normalise
from lockstep.workbench.diagnosis.operations.recurrent import GATES
from lockstep.workbench.diagnosis.operations.rotary import angles_of, magnitude
from lockstep.workbench.diagnosis.operations.shares import weight_names
from lockstep.workbench.diagnosis.operations.site import Site
from lockstep.workbench.diagnosis.recording import Array

#: Epsilons that engines have built in.
KNOWN_EPS = (1e-5, 1e-6, 1e-8, 1e-12, 1e-3, 1e-4, 1e-7, 1e-9, 1e-10)
#: Operations whose hypotheses are made here.
EDITED = ("norm", "residual", "activation")
#: Those that are plain sums of two terms.
_SUMS = ("residual", "mixed")
#: Norms of latents.
LATENT_NORMS = tuple(one.tap for one in LAYER.values() if one.kind == "norm" and "latent" in one.width)
#: Hypotheses that are reported of a site.
_SHOWN = 12
#: Elements on which pairs are tried.
PAIR_ELEMENTS = 1 << 11
#: What else the numbers of a clamped activation may be.
CLAMP_NUMBERS: Mapping[str, tuple[float, ...]] = {"limit": (math.inf,), "slope": (1.0,)}
#: What of a written latent a norm may read.
_OF_WRITTEN = (WITH_KEY, BEHIND_KEY, OWN_PART)
_MIXING = (
    "rows_before", "rows_before_of_sequence", "rows_after", "rows_mean_of_sequence", "rows_mean_of_step",
)  # fmt: skip


def row_edits(site: Site) -> Iterator[Variant]:
    """Every single edit that explains something of what was seen, the nearest first."""
    found = trial_of(site)
    if found is not None:
        trial, choices = found
        yield from _edited(trial, single(trial, edits_of(trial.formula, choices)))
        yield from (mapped_variant(site, one) for one in maps_of(site))


def known_edits(site: Site, known: Iterable[tuple[int | None, tuple[Edit, ...]]]) -> Iterator[Variant]:
    """Hypotheses that explained the same operation in other layers, each with its layer: of the tensors that stand
    alike to this one."""
    of_product = site.operation in PRODUCTS
    trials = [cache(partial(own_trial_of, site))] if of_product else []
    trials.append(cache(partial(_whole_trial, site, of_product)))
    for layer, edits in known:
        by = (site.layer or 0) - (layer or 0)
        moved = tuple(replace(one, detail=tuple(_moved(x, by) for x in one.detail)) for one in edits)
        able = (one for make in trials if (one := make()) is not None and _readable(one, moved))
        trial = next(able, None)
        if trial is not None and (solved := solve(trial, moved)) is not None:
            yield from (wording_of if of_product else _edited)(trial, [solved])


def _whole_trial(site: Site, of_product: bool) -> RowTrial | None:
    found = product_trial(site) if of_product else trial_of(site)
    return None if found is None else found[0]


def _moved(detail: str | float | None, by: int) -> str | float | None:
    return moved_name(detail, by) if isinstance(detail, str) else detail


def _readable(trial: RowTrial, edits: Sequence[Edit]) -> bool:
    """Whether all that the edits name is there."""
    if any(one.kind == "map" for one in edits):
        return False
    read = leaves(together(edits, trial.formula))
    return all(any(name in held for held in (trial.tokens, trial.others, trial.matrices)) for name in read)


def row_maps(site: Site) -> Iterator[Variant]:
    """Rows or columns of an operand in another order."""
    if site.seen.shape != site.expected.shape:
        return
    if site.operation in _SUMS:
        yield from (mapped_variant(site, one) for one in rows_of_terms(site, site.inputs))
    if site.operation == "activation" and "gate" in site.inputs:
        gate, up, right = site.inputs["gate"], site.inputs["up"], site.expected
        pools = ((np.ones_like(right), right, "the result"), (silu(gate), up, "up"), (up, silu(gate), "gate"))
        for kept, pool, what in pools:
            yield from (mapped_variant(site, one) for one in columns_paired(site, kept, pool, (what,)))
        if len(site.taps.ranks) > 1:
            for kept, role in ((silu(gate), "up"), (up, "gate")):
                whole = site.taps.whole(site.near(f"mlp.{role}"), site.passes)
                if whole is not None and len(whole) == len(kept):
                    pool = silu(whole) if role == "gate" else whole
                    found = columns_paired(site, kept, pool, (f"{role} of all ranks",))
                    yield from (mapped_variant(site, one) for one in found)


def row_edit_pairs(site: Site) -> Iterator[Variant]:
    """Two edits at once."""
    found = trial_of(site)
    if found is None:
        return
    trial, choices = found
    few = replace(trial, elements=PAIR_ELEMENTS)
    again = [
        solve(trial, one.open, one.numbers) for one in pairs(few, edits_of(trial.formula, choices))[:_SHOWN]
    ]
    yield from _edited(trial, [one for one in again if one is not None])


def row_free_maps(site: Site) -> Iterator[Variant]:
    """A number of its own for each row, or each column."""
    if site.operation in _SUMS and site.seen.shape == site.expected.shape:
        yield from (mapped_variant(site, one) for one in factors_of_terms(site, site.inputs))
    yield from (mapped_variant(site, one) for one in free_maps_of(site))


def _edited(trial: RowTrial, found: Sequence[Solved]) -> Iterator[Variant]:
    for solved in found[:_SHOWN]:
        tree, words = together(solved.edits, trial.formula), wording(trial.site, solved.edits)
        yield Variant(
            words.name, words.kind, words.text, words.fitted, trial.whole(tree), solved.cost,
            noise=trial.noise_of(tree), edits=solved.edits,
        )  # fmt: skip


def mapped_variant(site: Site, found: tuple[Edit, Array | Sequence[Array], int]) -> Variant:
    """A map of the result, what it gives, and how many numbers that took, in words."""
    edit, predicted, fitted = found
    words = wording(site, [edit])
    return Variant(words.name, words.kind, words.text, words.fitted, predicted, fitted, edits=(edit,))


def trial_of(site: Site) -> tuple[RowTrial, Choices] | None:
    """The operation with all that its formula may read; None where what came out has another shape."""
    shape = site.expected.shape
    if site.operation in GATES and (len(site.parts) > 1 or "whole" in site.inputs):
        return None  # of Mamba-2, whose mean is over the channels of a group
    whole = "whole" in site.inputs  # a norm over all heads, whose weight has all channels
    shard = whole and site.inputs["whole"].shape != site.inputs["x"].shape
    inputs = {role: x for role, x in site.inputs.items() if role != "whole"}
    if site.seen.shape != shape or any(x.size != site.expected.size for x in inputs.values()):
        return None
    if whole:
        shape = (shape[0], int(np.prod(shape[1:])))
    own = {role: np.reshape(x, shape) for role, x in inputs.items()}
    others = recorded(site, shape)
    operands = {
        role: [name for name, load in others.items() if not np.array_equal(load(), x)]
        for role, x in own.items()
    }  # fmt: skip
    tokens: dict[str, Load] = {**{role: partial(np.asarray, x) for role, x in own.items()}, **others}
    strided = [] if whole else list(by_own_width(site))
    for role, name, load in strided:
        tokens[name] = partial(_of_shape, load, shape)
        operands[role].append(name)
    apart = {*own, "whole", "angles", *_OF_WRITTEN, *(name for _, name, _ in strided)}
    weights, choices = _SPECIAL.get(site.operation, _of_any_other)(site, tokens)
    added = [
        name
        for name in others
        if site.operation == "residual" and all(name in one for one in operands.values())
    ]
    if whole:
        tokens["whole"] = partial(np.asarray, site.inputs["whole"])
        operands["whole"] = ["x"]
    return RowTrial(site, formula_at(site), Lazy(tokens), Lazy(weights)), replace(
        choices,
        operands={**_with_parts(operands, tokens), **choices.operands},
        results=[name for name in tokens if name not in apart],
        added=added,
        together=[
            *(names for names in _elsewhere(site) if all(one in others for one in names.values())),
            *(dict(some) for some in _all_inputs(strided, len(own))),
        ],
        dtypes=tuple(narrower(site.facts.dtype)),
        parts=[one for one in sorted({2, len(site.taps.ranks)} - {1}) if shape[-1] % one == 0 and not shard],
        rows=_MIXING,
    )


def _all_inputs(named: Sequence[tuple[str, str, Load]], count: int) -> Iterator[list[tuple[str, str]]]:
    """Of operands in the order of their roles those that stand alike for all of so many inputs."""
    alike = len(named) // count
    if count > 1 and len({role for role, *_ in named}) == count:
        yield from ([one[:2] for one in named[i::alike]] for i in range(alike))


def _of_shape(load: Load, shape: tuple[int, ...]) -> Any:
    return np.reshape(load(), shape)


def _with_parts(operands: Mapping[str, list[str]], tokens: Mapping[str, Load]) -> dict[str, list[str]]:
    parts = [name for name in _OF_WRITTEN if name in tokens]
    return {role: [*names, *(parts if role == "x" else ())] for role, names in operands.items()}


def _of_norm(site: Site, tokens: dict[str, Load]) -> tuple[dict[str, Load], Choices]:
    """Its weight, other norms' weights and epsilons; of heads, the rotation that comes after it."""
    model = site.facts.model
    if (own := site.weights.get("weight")) is None:
        return {"eps": lambda: eps_of(site.declared, model)}, Choices(numbers={"eps": KNOWN_EPS})
    held = site.facts.vector(own)
    names = list(norm_vectors(site.facts, own, 0 if held is None else len(held)))
    biases = (
        []
        if (bias := site.weights.get("bias")) is None
        else list(norm_vectors(site.facts, bias, 0 if held is None else len(held)))
    )
    weights: dict[str, Load] = {name: partial(site.facts.vector, name) for name in (*names, *biases)}
    weights |= {role: partial(site.facts.vector, name) for role, name in site.weights.items()}
    weights |= {"eps": lambda: eps_of(site.declared, model)}
    if "whole" in site.inputs:  # of each weight the rank's channels
        weights = {name: partial(_part, load, site.span) for name, load in weights.items()}
        width = site.expected.shape[-1] if site.expected.ndim == 2 else int(np.prod(site.expected.shape[1:]))
        if held is not None and site.span is not None and site.span.start:
            weights[FIRST_PART] = partial(np.asarray, held[:width])
            names.append(FIRST_PART)
    inserted: list[Detail] = []
    if site.expected.ndim == 3 and "whole" not in site.inputs:
        tokens["angles"] = lambda: angles_of(model, site.rows)
        weights["factor"] = lambda: magnitude(model)
        inserted = [("rope",)]
    tokens |= _of_latents(site)
    return weights, Choices(
        operands={"weight": names, "bias": biases},
        numbers={"eps": KNOWN_EPS},
        vectors=("weight", "bias"),
        inserted=inserted,
    )


def _of_latents(site: Site) -> dict[str, Load]:
    """What a norm of latents may read instead: the part of a key that lies behind them too, or in place of as many
    channels at their front; of several ranks the channels of one alone."""
    if site.kind not in LATENT_NORMS:
        return {}
    tap, count = site.near(f"attn.{site.kind[5:-5]}_proj"), len(site.taps.ranks)
    written, width = site.rows_of(tap), site.expected.shape[-1]
    if written is None:
        return {}
    found: dict[str, Load] = {}
    if written.shape[-1] > width:
        found |= {WITH_KEY: lambda: written, BEHIND_KEY: lambda: written[:, -width:]}
    size = -(-written.shape[-1] // count)
    inside = np.arange(written.shape[-1]) // size == site.rank
    if count > 1:
        found[OWN_PART] = lambda: np.where(inside, written, 0.0)[:, :width]
    return found


def _part(load: Load, span: slice | None) -> Any:
    found = load()
    return found[span] if span is not None and np.ndim(found) == 1 else found


def _of_residual(site: Site, tokens: dict[str, Load]) -> tuple[dict[str, Load], Choices]:
    """The norms that a term may go through; in place of the sum, what the norm that reads it makes of it."""
    model = site.facts.model
    norms = [one.module for one in operations_of(model) if one.kind == "norm"]
    names = [*(f"model.layers.{site.layer}.{module}" for module in norms), final_norm_of(model)]
    vectors = {name: site.facts.vector(name) for name in (f"{one}.weight" for one in names)}
    weights: dict[str, Load] = {
        name: partial(np.asarray, x)
        for name, x in vectors.items()
        if x is not None and x.shape == site.expected.shape[-1:]
    }
    reader = _reader_of(site)
    normed = site.rows_of(reader)
    if normed is None or normed.shape != site.expected.shape:
        normed = normalise(
            site.facts, weight_names(reader, "norm", site.facts).get("weight", ""), site.expected
        )
    tokens.pop(reader, None)
    if normed is not None and normed.shape == site.expected.shape:
        tokens[READER] = partial(np.asarray, normed)
    known = dict.fromkeys((model.rms_eps, 1e-5, 1e-6, 0.0))
    inserted: list[Detail] = [("norm", name, eps) for name in ("", *weights) for eps in known]
    scalar, others = site.weights.get("layer_scalar"), list[str]()
    if scalar is not None:
        layers = [layer for layer in range(model.num_layers) if layer != site.layer]
        others = [f"model.layers.{layer}.{LAYER_SCALAR}" for layer in layers]
        weights |= {name: partial(site.facts.vector, name) for name in others}
        weights["layer_scalar"] = partial(site.facts.vector, scalar)
    weights["residual_multiplier"] = lambda: model.residual_multiplier
    return weights, Choices(
        operands={"layer_scalar": others}, numbers={"residual_multiplier": (1.0,)},
        vectors=("layer_scalar",) if scalar else (), inserted=inserted,
    )  # fmt: skip


def _reader_of(site: Site) -> str:
    """The norm that reads a residual sum."""
    if site.kind == "attn_residual":
        return site.near("mlp_norm")
    layer = (site.layer or 0) + 1
    return "final_norm" if layer == site.facts.model.num_layers else f"layers.{layer}.attn_norm"


def _of_activation(site: Site, tokens: dict[str, Load]) -> tuple[dict[str, Load], Choices]:
    """The numbers of a clamped one: without the clamp, and with a plain sigmoid; those of xIELU."""
    if site.facts.model.activation == "xielu":
        trained: dict[str, Load] = {
            role: partial(site.facts.vector, name) for role, name in site.weights.items()
        }
        return trained, Choices(numbers={"xielu_beta": (0.0, 1.0), "xielu_eps": ()}, orders=False)
    if site.facts.model.clamp is None:
        return {}, Choices()
    numbers = numbers_of(site.facts.model)
    held: dict[str, Load] = {name: partial(float, numbers[name]) for name in CLAMP_NUMBERS}
    return held, Choices(numbers=CLAMP_NUMBERS)


def _of_any_other(site: Site, tokens: dict[str, Load]) -> tuple[dict[str, Load], Choices]:
    """Of any other row-wise operation its weights, and the numbers of the model."""
    weights: dict[str, Load] = {
        role: partial(_part, partial(site.facts.vector, name), site.span)
        for role, name in site.weights.items()
    }
    numbers = {
        name: partial(float, x) for name, x in numbers_of(site.facts.model).items() if name not in tokens
    }
    return {**weights, **numbers}, Choices(numbers=dict.fromkeys(numbers, ()), vectors=tuple(site.weights))


_SPECIAL: Mapping[str, Callable[[Site, dict[str, Load]], tuple[dict[str, Load], Choices]]] = {
    "norm": _of_norm,
    "residual": _of_residual,
    "activation": _of_activation,
}


def _elsewhere(site: Site) -> Iterator[Mapping[str, str]]:
    """What the operation reads in other layers and on other ranks: role -> name of the operand."""
    declared = operation_at(site.tap)
    if declared is None or len(declared.inputs) < 2:
        return
    layers, ranks = site.facts.model.num_layers, site.taps.ranks
    for layer in range(layers):
        if layer != site.layer:
            yield {role: near(tap, layer, layers) for role, tap in declared.inputs.items()}
    for rank in ranks:
        if rank != site.rank:
            yield {role: operand_name(site.near(tap), rank) for role, tap in declared.inputs.items()}
