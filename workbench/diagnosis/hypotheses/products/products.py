"""Hypotheses about products and their sums over the ranks: edits of `x @ weight + bias`, and of `sum(partial) + bias`.

for variant in product_edits(site): ...      # a bank, as `diagnosis.search` takes them
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial

import numpy as np

from lockstep.engine.config import ModelConfig
from lockstep.engine.graph import GATE_UP, MULTIPLIED, QKV, final_norm_of, operation_of
from lockstep.engine.graph.formula import Node, numbers_of
from lockstep.engine.taps.names import layer_of
from lockstep.workbench.diagnosis.hypotheses.edits import Detail, Edit, leaves, nodes, together
from lockstep.workbench.diagnosis.hypotheses.functions import COARSE, MISREAD
from lockstep.workbench.diagnosis.hypotheses.generate import Choices, edits_of
from lockstep.workbench.diagnosis.hypotheses.head_orders import head_width
from lockstep.workbench.diagnosis.hypotheses.maps import Mapped, columns_of_another
from lockstep.workbench.diagnosis.hypotheses.operands import formula_at, recorded
from lockstep.workbench.diagnosis.hypotheses.passes import (
    LARGEST_BEFORE,
    largest_before,
    step_before,
)
from lockstep.workbench.diagnosis.hypotheses.products.caps import CAP, OF_LOGITS, uncapped_noise, without_cap
from lockstep.workbench.diagnosis.hypotheses.products.columns import columns_moved, not_cut, slices_elsewhere
from lockstep.workbench.diagnosis.hypotheses.products.features import (
    cut_along_inputs,
    features_changed,
    features_ordered,
    features_scaled,
    nothing_multiplied,
    single_weights,
)
from lockstep.workbench.diagnosis.hypotheses.products.head import (
    head_inputs,
    ids_elsewhere,
    not_the_head,
    rows_of_others,
    rows_shifted,
)
from lockstep.workbench.diagnosis.hypotheses.products.maps import moved_maps, scaled_maps
from lockstep.workbench.diagnosis.hypotheses.products.matrices import (
    Matrix,
    biases_instead,
    other_weights,
    own_part,
    shards_elsewhere,
    weights_instead,
)
from lockstep.workbench.diagnosis.hypotheses.products.sums import (
    counted,
    former_output,
    former_partials,
    in_eight_bits,
    reduced_otherwise,
    summed_already,
)
from lockstep.workbench.diagnosis.hypotheses.products.table import (
    added_by_position,
    foreign_rows,
    ids_of_a_rank,
    other_ids,
    other_numbers,
    waves,
)
from lockstep.workbench.diagnosis.hypotheses.products.unknown import (
    another_input,
    other_weight,
    unrelated_weight,
)
from lockstep.workbench.diagnosis.hypotheses.products.words import wording
from lockstep.workbench.diagnosis.hypotheses.roundings import WEIGHTS
from lockstep.workbench.diagnosis.hypotheses.search import single
from lockstep.workbench.diagnosis.hypotheses.solve import Solved, solve
from lockstep.workbench.diagnosis.hypotheses.trial import Lazy, Load, RowTrial
from lockstep.workbench.diagnosis.hypotheses.variant import PARTLY, Variant
from lockstep.workbench.diagnosis.operations.facts import UNIT
from lockstep.workbench.diagnosis.operations.shares import weight_names
from lockstep.workbench.diagnosis.operations.site import Site
from lockstep.workbench.diagnosis.recording import Array

#: Hypotheses that are reported of a site.
_SHOWN = 12
_DTYPES = ("bfloat16", "float16", "float32")


@dataclass(frozen=True, slots=True)
class _Pool:
    """Leaves of one operation, and what may stand for them or be done to them."""

    rows: dict[str, Load] = field(default_factory=dict)
    matrices: dict[str, Load] = field(default_factory=dict)
    others: dict[str, Load] = field(default_factory=dict)
    operands: dict[str, list[str]] = field(default_factory=dict)
    together: list[Mapping[str, str]] = field(default_factory=list)
    applied: dict[str, list[Detail]] = field(default_factory=dict)


def product_edits(site: Site) -> Iterator[Variant]:
    """What costs little: other operands of this layer, parts and readings of the own weight, the bias, a factor."""
    found = trial_of(site)
    if found is not None:
        trial, choices = found
        edits = [*edits_of(trial.formula, choices), *_normed(trial)]
        yield from wording_of(trial, single(trial, edits))


def product_maps(site: Site) -> Iterator[Variant]:
    """Rows and columns of others, or of nothing; orders, terms of ranks."""
    yield from mapped_by(site, _MAPS[site.operation])


def product_fits(site: Site) -> Iterator[Variant]:
    """The same, of more numbers."""
    yield from mapped_by(site, _FITS[site.operation])
    if site.operation == "reduce":
        for edit, predicted, noise in in_eight_bits(site):
            yield replace(_variant(site, edit, predicted, 0), noise=noise)


def product_unknown(site: Site) -> Iterator[Variant]:
    """Another input, or other numbers of the weight."""
    yield from mapped_by(site, _UNKNOWN[site.operation])


def mapped_by(site: Site, maps: Sequence[Callable[[Site], Iterator[Mapped]]]) -> Iterator[Variant]:
    for each in maps if site.deviation is not None else ():
        yield from (_variant(site, *one) for one in each(site))


def _variant(site: Site, edit: Edit, predicted: Array, fitted: int) -> Variant:
    words = wording(site, [edit])
    assert words is not None, "every map has a name"
    return Variant(words.name, words.kind, words.text, words.fitted, predicted, fitted, edits=(edit,))


_MAPS: Mapping[str, Sequence[Callable[[Site], Iterator[Mapped]]]] = {
    "linear": (
        counted, summed_already, not_cut, columns_moved, moved_maps, cut_along_inputs, single_weights,
        nothing_multiplied, features_ordered, columns_of_another,
    ),
    "reduce": (counted, moved_maps),
    "head": (not_the_head, rows_of_others, ids_elsewhere, rows_shifted),
    "embedding": (other_ids, added_by_position, foreign_rows, moved_maps, scaled_maps),
}  # fmt: skip
_UNKNOWN: Mapping[str, Sequence[Callable[[Site], Iterator[Mapped]]]] = {
    "linear": (another_input, unrelated_weight, other_weight),
    "head": (another_input, other_weight),
    "embedding": (other_numbers,),
}
_FITS: Mapping[str, Sequence[Callable[[Site], Iterator[Mapped]]]] = {
    "linear": (scaled_maps, features_changed, former_output, features_scaled),
    "reduce": (former_partials, former_output, scaled_maps, reduced_otherwise, slices_elsewhere),
    "head": (scaled_maps, moved_maps, single_weights, features_changed, features_scaled),
    "embedding": (ids_of_a_rank,),
}


def product_coarse(site: Site) -> Iterator[Variant]:
    """Weights of other layers; weight, input or result in fewer bits, or cut off."""
    found = trial_of(site)
    if found is None:
        return
    trial = found[0]
    places = {node.name: path for path, node in nodes(trial.formula) if not node.args}
    later: dict[str, list[Detail]] = {"result": [(one,) for one in _coarser(site, _DTYPES)]}
    if "weight" in places:
        fewer = _coarser(site, (*_DTYPES[:2], *COARSE))
        later["x"] = [*((one,) for one in fewer), ("clamped_within", None), ("saturated", None)]
        later["x"] += [(how, name) for name in LARGEST_BEFORE for how in ("saturated", "saturated_float8")]
        later["weight"] = [(one,) for one in (*fewer, *WEIGHTS, *MISREAD)]
    plain = Choices(orders=False, usual=False, applied=later, vectors=("weight", "bias"))
    edits = [one for one in edits_of(trial.formula, plain) if one.kind == "applied"]
    if "weight" in places:
        edits += [Edit((), "throughout", (one,)) for one in _coarser(site, _DTYPES)]
        names = [name for name in trial.matrices if name.endswith(".weight")]
        edits += [Edit(places["weight"], "operand", (name,)) for name in names]
        edits += [_together(trial.formula, name) for name in names if _bias_of(name) in trial.others]
    yield from wording_of(trial, single(trial, edits))
    if "weight" in places:
        both = [
            solve(trial, [Edit(places[leaf], "applied", (to,)) for leaf in ("x", "weight")]) for to in fewer
        ]
        yield from wording_of(trial, [one for one in both if one is not None and one.left <= PARTLY])


def _coarser(site: Site, names: Sequence[str]) -> list[str]:
    return [one for one in names if UNIT.get(one, 1.0) > site.facts.unit]


def _bias_of(weight: str) -> str:
    return weight.removesuffix(".weight") + ".bias"


def _together(formula: Node, weight: str) -> Edit:
    """Weight and bias of another module."""
    return Edit((), "operands", ("weight", weight, "bias", _bias_of(weight)))


def wording_of(trial: RowTrial, found: Sequence[Solved]) -> Iterator[Variant]:
    """The hypotheses in words. A product of nothing is reported elsewhere: it does not show whose fault that is."""
    for solved in found[:_SHOWN]:
        words = wording(trial.site, solved.edits)
        if words is None:
            continue
        other = any(one.place == CAP or without_cap(trial.formula, one) for one in solved.edits)
        noise = uncapped_noise(trial) if other else None
        rounds = [UNIT[str(one.detail[0])] for one in solved.edits if one.detail and one.detail[0] in UNIT]
        tolerance = max(rounds) if rounds and solved.edits[0].place == () else 0.0
        yield Variant(
            words.name, words.kind, words.text, words.fitted, trial.whole(together(solved.edits, trial.formula)),
            solved.cost, tolerance, noise, edits=solved.edits,
        )  # fmt: skip


@lru_cache(maxsize=1)
def trial_of(site: Site) -> tuple[RowTrial, Choices] | None:
    """The operation with all that its formula may read; None where what came out is not finite or of another shape."""
    return _trial_of(site, alone=False)


def own_trial_of(site: Site) -> RowTrial | None:
    """The same with what is read where all is right, alone: looking for all else takes ten times as long."""
    found = _trial_of(site, alone=True)
    return None if found is None else found[0]


def _trial_of(site: Site, alone: bool) -> tuple[RowTrial, Choices] | None:
    part = site.parts[0]
    if site.deviation is None or not part.fits or not np.isfinite(part.seen).all():
        return None
    pool = _Pool(applied={"result": []})
    if "weight" in site.weights and not _of_product(site, pool, alone):
        return None
    if "bias" in site.weights:
        vector = own_part(site, site.weights["bias"])
        if vector is None:
            return None
        pool.others["bias"] = lambda: vector.astype(np.float64)
        pool.applied["bias"] = [("scaled", None)]
    if site.operation in ("linear", "reduce") and not alone:
        _of_bias(site, pool)
        _added(site, pool)
    if site.operation == "reduce":
        pool.rows["partial"] = lambda: np.ascontiguousarray(site.inputs["partial"].swapaxes(0, 1))
    pool.applied["result"].insert(0, ("scaled", None))
    formula = formula_at(site)
    read = leaves(formula)
    numbers = {name: values for name, values in OF_LOGITS.items() if name in read}
    for name, value in numbers_of(site.facts.model, site.declared).items():
        if numbers or name in read:
            pool.others.setdefault(name, partial(float, value))
    trial = RowTrial(site, formula, Lazy(pool.rows), Lazy(pool.others), matrices=Lazy(pool.matrices))
    trial.functions["sum"] = lambda partial: partial.sum(1)
    return trial, Choices(
        operands=pool.operands, together=pool.together, vectors=("weight", "bias", "token"),
        orders=False, applied=pool.applied, usual=False, numbers=numbers,
    )  # fmt: skip


def _of_product(site: Site, pool: _Pool, alone: bool) -> bool:
    """Inputs and weights; whether there is a weight."""
    own = own_part(site, site.weights["weight"])
    if own is None:
        return False
    pool.matrices["weight"] = lambda: own
    if site.operation == "embedding":
        pool.rows["token"] = lambda: np.array([row.token for row in site.rows])
    else:
        pool.rows["x"] = lambda: site.inputs["x"]
    if alone:
        return True
    weights = {name: load for name, load in weights_instead(site) if _fits(load, own)}
    others = dict(other_weights(site))
    pool.operands["weight"] = [*weights]
    if site.operation == "linear":
        of_linear = _of_linear(site, pool, own)
        pool.operands["weight"] += [name for name in of_linear if name in others or " from " in name]
        weights |= {name: load for name, load in of_linear.items() if " from " in name}
    else:
        _of_end(site, pool)
        pool.operands["weight"] += others
    pool.matrices.update(others | weights)
    return True


def _of_linear(site: Site, pool: _Pool, own: Matrix) -> dict[str, Load]:
    """Its input, and what it may have read instead; weights of the same input, and shards cut elsewhere."""
    x = site.inputs["x"]
    inputs = recorded(site, x.shape)
    pool.rows.update(inputs)
    pool.rows.update({name: partial(largest_before, site, x, name) for name in LARGEST_BEFORE})
    pool.operands["x"] = [name for name, load in inputs.items() if _another(load(), x)]
    pool.applied["x"] = [("scaled", None), *_orders(site, x.shape[1])]
    scope = site.deviation.scopes[0]  # type: ignore[union-attr]
    elsewhere = dict(shards_elsewhere(site, np.flatnonzero(scope.any(1)), np.flatnonzero(scope.any(0))))
    pool.others.update({name: load for name, load in elsewhere.items() if ".bias" in name})
    siblings = [weight_names(site.near(kind), "linear", site.facts)["weight"] for kind in _pack(site.kind)]
    found = dict.fromkeys((one for one in siblings if one != site.weights["weight"]), lambda: own)
    return {**found, **{name: load for name, load in elsewhere.items() if ".weight" in name}}


def _of_end(site: Site, pool: _Pool) -> None:
    """What the head reads, and what is done to logits; ids, and what is done to rows of the embedding."""
    if site.operation == "head":
        x, inputs = site.inputs["x"], dict(head_inputs(site))
        pool.rows.update({name: partial(largest_before, site, x, name) for name in LARGEST_BEFORE})
        pool.rows.update({name: partial(np.asarray, one) for name, one in inputs.items()})
        pool.operands["x"] = [
            name for name, one in inputs.items() if one.shape == x.shape and _another(one, x)
        ]
        names = ("log_softmax", "probabilities") if site.span is None else ()
        pool.applied["result"] = [("capped", None), *((name,) for name in names)]
        return
    added = waves(site)
    pool.rows.update({name: partial(np.asarray, one) for name, one in added.items()})
    plus: list[Detail] = [("plus", name, None) for name in added]
    pool.applied["result"] = [
        ("centred",),
        ("unit_length",),
        ("layer_normed", site.facts.model.rms_eps),
        *plus,
    ]
    norms = {name: site.facts.vector(name) for name in _outer_norms(site.facts.model)}
    pool.others.update({name: partial(np.asarray, one) for name, one in norms.items() if one is not None})


def _outer_norms(model: ModelConfig) -> list[str]:
    """The weights of the first norm and of the last one."""
    first = operation_of(model.of_layer(0), "attn_norm")
    modules = [*([] if first is None else [f"model.layers.0.{first.module}"]), final_norm_of(model)]
    return [f"{module}.weight" for module in modules]


def _normed(trial: RowTrial) -> Iterator[Edit]:
    """Rows of the embedding that go through a norm."""
    if trial.site.operation == "embedding":
        known = dict.fromkeys((trial.site.facts.model.rms_eps, 0.0, 1e-6, 1e-5))
        names = [name for name in _outer_norms(trial.site.facts.model) if name in trial.others]
        yield from (Edit((), "inserted", ("norm", name, eps)) for name in ("", *names) for eps in known)


def _another(x: Array, own: Array) -> bool:
    return bool(x.any()) and not np.array_equal(x, own)


def _fits(load: Load, own: Matrix) -> bool:
    found = load()
    return found is not None and found.shape == own.shape


def _pack(kind: str) -> tuple[str, ...]:
    """Products of the same input."""
    return QKV if kind in QKV else GATE_UP if kind in GATE_UP else ()


def _multiplied(site: Site) -> str:
    """The tap whose rows are multiplied; of a sum over ranks what its terms are made of."""
    declared = site.declared
    if declared is not None and "partial" in declared.inputs:
        declared = operation_of(site.facts.model, declared.inputs["partial"])
    return "" if declared is None else declared.inputs["x"]


def _orders(site: Site, width: int) -> Iterator[Detail]:
    """Orders of the in features that reshaping and transposing leave, whole or by head, and counting from the end."""
    head_dim = site.facts.model.head_dim
    groups = (width, head_dim) if width % head_dim == 0 and width > head_dim else (width,)
    for group in groups:
        yield from (("reshaped", float(group), float(n)) for n in range(2, group) if group % n == 0)
        yield ("groups_backwards", float(group))
    if len(groups) > 1:
        yield ("groups_reversed", float(head_dim))
    wide = head_width(site, _multiplied(site))
    heads = width // wide if wide > 1 and width % wide == 0 else 0
    yield from (("reshaped", float(width), float(n), float(wide)) for n in range(2, heads) if heads % n == 0)
    yield from (("columns_moved", float(by)) for by in (1, -1, width // 2))


def _of_bias(site: Site, pool: _Pool) -> None:
    """Vectors in place of the bias, and beside a weight that is misread or cut as they are."""
    own, width = site.weights.get("bias", ""), site.expected.shape[1]
    found = {name: load for name, load in biases_instead(site, width) if np.shape(load()) == (width,)}
    known = own_part(site, own) if own else None
    pool.others.update(found)
    if known is None:
        pool.applied["result"] += [("plus", name, 1.0) for name in found]
        return
    pool.operands["bias"] = [name for name, load in found.items() if not np.array_equal(load(), known)]
    if site.operation == "linear":
        for name in pool.operands.get("weight", ()):
            how = name.removeprefix(site.weights["weight"])
            if (bias := own + how if how != name else _bias_of(name)) in pool.others:
                pool.together.append({"x": "x", "weight": name, "bias": bias})


def _added(site: Site, pool: _Pool) -> None:
    """What may be in the result as well: the residual stream, what the buffer held."""
    shape, added = site.expected.shape, dict[str, Load]()
    if site.kind in MULTIPLIED:
        stream = site.near("<" if site.kind == "attn.o_proj" else "attn_residual")
        x = site.rows_of(stream)
        if x is not None and x.shape == shape:
            added[stream] = partial(np.asarray, x)
            pool.applied["result"].append(("plus", stream, None))
    for layer in range(site.facts.model.num_layers):
        tap = f"layers.{layer}.{site.kind}"
        x = site.rows_of(tap) if layer != layer_of(site.tap) else None
        if x is not None and x.shape == shape and np.isfinite(x).all():
            added[tap] = partial(np.asarray, x)
    before = step_before(site)
    if before.any():
        added["the step before"] = lambda: before
    pool.rows.update(added)
    pool.applied["result"] += [("plus", name, 1.0) for name in added]
