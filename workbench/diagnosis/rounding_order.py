"""In what order a 16-bit engine rounds: which of the inner results of an operation it rounds to its dtype, as its own
bits show, held against the reference at the same dtype.

A norm may round before it multiplies by its weight or after it, may read the residual sum before that is rounded, an
activation may keep its sigmoid in float32. None of it is an error beyond the dtype's noise, all of it changes tokens
(https://github.com/huggingface/transformers/pull/29402): so it is a note, never an accusation.

Every subset of the inner nodes of an operation's formula is tried: which has the bits that were recorded?
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from lockstep.engine.config import ModelConfig
from lockstep.engine.graph import operation_of
from lockstep.engine.graph.formula import (
    FUNCTIONS,
    Node,
    formula_of,
    numbers_of,
    substitute,
)
from lockstep.engine.taps.flow import is_known, near
from lockstep.engine.taps.names import layer_of, local_name
from lockstep.workbench.diagnosis.causes import taps_in_words
from lockstep.workbench.diagnosis.hypotheses.edits import nodes
from lockstep.workbench.diagnosis.hypotheses.formula_text import formula_text
from lockstep.workbench.diagnosis.hypotheses.trial import evenly
from lockstep.workbench.diagnosis.operations.expected import (
    Lacking,
    Operands,
    as_normalised,
    heads_of,
    turned,
)
from lockstep.workbench.diagnosis.operations.facts import SIXTEEN_BITS, Facts, on_grid, rounded
from lockstep.workbench.diagnosis.operations.recorded import RecordedTaps
from lockstep.workbench.diagnosis.operations.rotary import angles_of, frequencies, lengths_of, magnitude
from lockstep.workbench.diagnosis.operations.site import Site
from lockstep.workbench.diagnosis.operations.sites import sites_of
from lockstep.workbench.diagnosis.recording import Array
from lockstep.workbench.words.plain_text import listed

Path = tuple[int, ...]
#: The nodes of a formula, by their paths, whose values are rounded.
Order = frozenset[Path]

#: Operations whose roundings on the way are looked for; and what engines hold in float32 or not.
_KINDS = ("norm", "rope", "activation", "residual", "embedding", "choice_weights")
_GRIDS = ("mlp.router", "mlp.topk_weights", "logits", "attn.state", "attn.ssm_state")
#: Rows that are looked at, and the share of elements whose bits an order has to have: what float32 loses inside of an
#: operation moves a few over the middle of two numbers.
_ROWS, _SHARE = 8, 0.97
#: Of results that are wider than the engine's dtype, as a router's are: of each element the share that float32 loses.
_WIDE = 2.0**-18
#: Functions that pick numbers, and round none.
_PICKING = ("taken",)
#: Orders are as good where their shares are that near, and others where they are that far apart.
_SAME, _APART = 0.003, 0.02


@dataclass(frozen=True, slots=True)
class RoundingOrder:
    """Operations that round on their way what the reference does not (`more`), or the reverse (`less`), in words.
    `shares` of the elements at `taps` have exactly the bits that their own order gives, and that the reference's gives;
    None where results alone were held against each other."""

    taps: tuple[str, ...]
    dtype: str
    more: tuple[str, ...]
    less: tuple[str, ...]
    shares: tuple[float, float] | None = None

    def in_words(self, layers: int, other: str = "the reference") -> str:
        """A sentence of it; `other` is what the engine is held against."""
        does = [f"rounds {listed(self.more)}, which {other} does not"] if self.more else []
        does += [f"does not round {listed(self.less)}, which {other} does"] if self.less else []
        text = (
            f"within what {self.dtype} allows, another rounding than {other}'s: "
            f"{taps_in_words(self.taps, layers)}: {', and '.join(does)}"
        )
        if self.shares is None:
            return text
        own, theirs = self.shares
        return f"{text} (its order gives {own:.1%} of the elements bit by bit, {other}'s {theirs:.1%})"


@dataclass(frozen=True, slots=True)
class _Rounded:
    """A site's formula on a sample of its rows, and what was seen of these."""

    formula: Node
    given: Mapping[str, Any]
    seen: Array
    dtype: str

    @property
    def _wide(self) -> bool:
        return not on_grid(self.seen, self.dtype)

    def share(self, order: Order) -> float:
        """The share of elements that it has bit by bit."""
        with np.errstate(all="ignore"):
            return self._share(np.asarray(self._value(self.formula, (), order)))

    def orders(self) -> Mapping[Order, float]:
        """Every order with its share."""
        with np.errstate(all="ignore"):
            return {order: self._share(value) for order, value in self._values(self.formula, ())}

    def _share(self, value: Array) -> float:
        if value.size != self.seen.size:
            return 0.0
        if self._wide:
            return float(np.isclose(value.reshape(self.seen.shape), self.seen, _WIDE, 0).mean())
        same = float((self._rounded(value).reshape(self.seen.shape) == self.seen).mean())
        if self.formula != _ROTATED or self.dtype != "bfloat16":
            return same
        return max(same, float((_cut(value).reshape(self.seen.shape) == self.seen).mean()))

    def _value(self, node: Node, path: Path, order: Order) -> Any:
        if not node.args:
            return self.given[node.name]
        args = [self._value(one, (*path, i), order) for i, one in enumerate(node.args)]
        value = _FUNCTIONS[node.name](*args)
        return self._rounded(value) if path in order else value

    def _values(self, node: Node, path: Path) -> Iterator[tuple[Order, Any]]:
        """The node's value by every order of the nodes below it, and of itself."""
        if not node.args:
            yield frozenset(), self.given[node.name]
            return
        below = [list(self._values(one, (*path, i))) for i, one in enumerate(node.args)]
        for chosen in itertools.product(*below):
            order = frozenset[Path]().union(*(one for one, _ in chosen))
            value = _FUNCTIONS[node.name](*(x for _, x in chosen))
            yield order, value
            if path and node.name not in _PICKING:  # the result itself is rounded in any case
                yield order | {path}, self._rounded(value)

    def _rounded(self, value: Any) -> Array:
        return rounded(np.asarray(value), self.dtype).astype(np.float64)


def _cut(value: Array) -> Array:
    """bfloat16 as CPU kernels store it without an instruction for it: the lower half of the bits of a float32 is cut
    off."""
    bits = np.ascontiguousarray(value, dtype=np.float32).view(np.uint32) & np.uint32(0xFFFF0000)
    return bits.view(np.float32).astype(np.float64)


_FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    **FUNCTIONS,
    "identity": lambda x: x,  # a number or a table that may be rounded by itself
    "inverse": lambda x: 1 / x,
}
_ROTATED = Node("add", (
    Node("multiply", (Node("x"), Node("identity", (Node("cos"),)))),
    Node("multiply", (Node("rotate_half(x)"), Node("identity", (Node("sin"),)))),
))  # fmt: skip
_FREQUENCIES = "the frequencies"
#: The residual sum that a norm reads.
_SUM = Node("add", (Node("stream"), Node("branch")))
_NAMES = {"weight": "w", "whole": "x"}


def rounding_orders(
    taps: RecordedTaps, reference: RecordedTaps, facts: Facts, wrong: Sequence[str] = ()
) -> Iterator[RoundingOrder]:
    """Where an engine rounds in another order than `reference`, which is recorded at the engine's dtype; of none of
    the taps that are `wrong`. Nothing of an engine of 32 bits or more."""
    if facts.dtype not in SIXTEEN_BITS:
        return
    theirs: dict[tuple[str, Node], Mapping[Order, float]] = {}
    found: dict[tuple[str, bool], list[_Place]] = {}  # by what is rounded, and whether the engine does
    for tap in (one.name for one in taps.recording.session.taps):
        if not (is_known(tap) and taps.captured(tap)) or tap in wrong:
            continue
        kind = local_name(tap)
        if kind in _GRIDS and (narrow := _narrower(tap, taps, reference, facts.dtype)) is not None:
            found.setdefault(("its result", narrow), []).append(_Place(tap))
            continue
        one = _first(tap, taps, facts)
        if one is None:
            continue
        key = kind, one.formula  # which is another where there is no sum before it
        if key not in theirs:
            theirs[key] = _best(_first(tap, reference, facts), one.formula)
        if theirs[key] and (both := _coarse_frequencies(tap, taps, facts, one, theirs[key])) is not None:
            found.setdefault((_FREQUENCIES, True), []).append(_Place(tap, both))
        elif theirs[key] and (other := _other(one, theirs[key])) is not None:
            ours, shares = other
            for words, does in _difference(one.formula, ours, _least(theirs[key])):
                found.setdefault((words, does), []).append(_Place(tap, shares))
    yield from _together(found, facts.dtype)


@dataclass(frozen=True, slots=True)
class _Place:
    """A tap, and the shares of its elements as in `RoundingOrder`."""

    tap: str
    shares: tuple[float, float] | None = None


def _together(found: Mapping[tuple[str, bool], list[_Place]], dtype: str) -> Iterator[RoundingOrder]:
    """What differs at the same taps as one."""
    alike: dict[tuple[_Place, ...], list[tuple[str, bool]]] = {}
    for what, where in found.items():
        alike.setdefault(tuple(where), []).append(what)
    for places, whats in alike.items():
        more, less = (tuple(words for words, does in whats if does is wanted) for wanted in (True, False))
        bits = [one.shares for one in places if one.shares is not None]
        shares = (min(own for own, _ in bits), max(other for _, other in bits)) if bits else None
        yield RoundingOrder(tuple(one.tap for one in places), dtype, more, less, shares)


def _other(one: _Rounded, theirs: Mapping[Order, float]) -> tuple[Order, tuple[float, float]] | None:
    """The order that an operation has where none of the reference's gives its bits: with its share and theirs."""
    of_theirs = max(one.share(order) for order in theirs)
    if of_theirs >= 1 - _SAME:
        return None
    ours = _best(one, one.formula)
    if not ours or set(ours) & set(theirs) or max(ours.values()) - of_theirs < _APART:
        return None
    usual = _least(theirs)
    nearest = min(ours, key=lambda order: (len(order ^ usual), sorted(order)))
    return nearest, (ours[nearest], of_theirs)


def _coarse_frequencies(
    tap: str, taps: RecordedTaps, facts: Facts, one: _Rounded, theirs: Mapping[Order, float]
) -> tuple[float, float] | None:
    """Whether frequencies of the engine's dtype give the bits of a rotation that no order of roundings by those of
    float32 gives: with the share of these and of the reference's."""
    of_theirs = max(one.share(order) for order in theirs)
    if one.formula != _ROTATED or of_theirs >= 1 - _SAME:
        return None
    coarse = _first(tap, taps, facts, coarse=True)
    shares = () if coarse is None else _best(coarse, coarse.formula).values()
    best = max(shares, default=0.0)
    return None if not shares or best - max(one.orders().values()) < _APART else (best, of_theirs)


def _best(one: _Rounded | None, formula: Node) -> Mapping[Order, float]:
    """The orders that give what was seen, as good as each other; none where even the best does not, or the operation's
    formula is another."""
    shares = {} if one is None or one.formula != formula else one.orders()
    best = max(shares.values(), default=0.0)
    return {order: share for order, share in shares.items() if share >= max(best - _SAME, _SHARE)}


def _least(orders: Mapping[Order, float]) -> Order:
    """Of equals the one with the fewest roundings, nearest to the result."""
    return min(orders, key=lambda order: (len(order), sum(map(len, order)), sorted(order)))


def _difference(formula: Node, ours: Order, theirs: Order) -> Iterator[tuple[str, bool]]:
    """What one order alone rounds, in words, and whether it is ours."""
    at = dict(nodes(formula))
    found = [
        (_text(at[path]), does)
        for order, does in ((ours - theirs, True), (theirs - ours, False))
        for path in sorted(order, key=lambda path: (-len(path), path))
    ]
    yield from dict.fromkeys(found)


def _text(node: Node) -> str:
    """A node as a reader writes it, the sum that a norm reads as its x, quotients as such."""
    return "the residual sum that it reads" if node == _SUM else formula_text(_as_read(node), _NAMES)


def _as_read(node: Node) -> Node:
    if node == _SUM:
        return Node("x")
    args = tuple(map(_as_read, node.args))
    if node.name == "multiply" and args[1].name == "inverse":
        return Node("divide", (args[0], *args[1].args))
    return replace(node, args=args)


def _first(tap: str, taps: RecordedTaps, facts: Facts, *, coarse: bool = False) -> _Rounded | None:
    """The operation at a tap on the lowest rank, `coarse`: by rounded frequencies; None where it rounds nothing on its
    way, or lacks something."""
    declared = operation_of(facts.model, local_name(tap))
    if declared is None or not _rounds_on_its_way(declared.kind, facts.of_layer(layer_of(tap)).model):
        return None
    site = next(iter(sites_of(tap, taps, facts)), None) if taps.captured(tap) else None
    if not isinstance(site, Site) or site.operation != declared.kind or not site.parts[0].fits:
        return None
    at = evenly(np.arange(len(site.rows)), _ROWS)
    try:
        formula, given = _formula(site, at, coarse=coarse)
    except Lacking:
        return None
    return _Rounded(formula, given, site.seen[at], site.facts.dtype)


def _rounds_on_its_way(kind: str, model: ModelConfig) -> bool:
    """Whether an operation's formula has inner results, and not so many as xIELU: ten of them have 1,024 orders,
    which a few rows cannot distinguish."""
    if kind == "activation" and model.activation == "xielu":
        return False
    factors = {"embedding": model.embedding_multiplier, "residual": model.residual_multiplier}
    return kind in _KINDS and factors.get(kind, 0) != 1


def _formula(site: Site, at: Any, *, coarse: bool = False) -> tuple[Node, Mapping[str, Any]]:
    """What a site computes, in nodes as engines have them, and its leaves on these rows. Lacking without a weight."""
    declared, model = site.declared, site.facts.model
    if declared is None:
        raise Lacking("the model is not known")
    inputs = {role: x[at] for role, x in site.inputs.items()}
    given: dict[str, Any] = {"bias": 0.0, **numbers_of(model, declared), **inputs}
    operands = Operands(
        site.facts, site.rows, site.inputs, site.weights, site.span, site.columns, declared, site.held
    )  # fmt: skip
    formula = formula_of(declared, model)
    match site.operation:
        case "rope":
            return _ROTATED, _rotation(site, at, heads_of(inputs["x"], model.head_dim), coarse=coarse)
        case "embedding":
            given |= {"weight": operands.weight(), "token": [site.rows[i].token for i in at]}
            return substitute(formula, {name: Node("identity", (Node(name),)) for name in _FACTORS}), given
        case "choice_weights" if "expert_scale" in site.weights:
            given["expert_scale"] = operands.weight("expert_scale").astype(np.float64)
        case "residual":
            return substitute(formula, {name: Node("identity", (Node(name),)) for name in _FACTORS}), given
        case "norm":
            weight = operands.norm_weight()
            bias = operands.bias()
            given |= {"weight": weight, "bias": 0.0 if bias is None else bias}
            given["x"] = as_normalised(given["x"], weight)
            terms = _terms(site)
            if terms is not None and "whole" not in inputs:
                formula = substitute(formula, {"x": _SUM})
                given |= {name: as_normalised(x[at], weight) for name, x in terms.items()}
            formula = _by_reciprocals(formula)
    return formula, given


def _by_reciprocals(node: Node) -> Node:
    """Quotients as engines compute them, x * (1 / y), so that the reciprocal may be rounded by itself."""
    args = tuple(map(_by_reciprocals, node.args))
    if node.name == "divide":
        return Node("multiply", (args[0], Node("inverse", args[1:])))
    return replace(node, args=args)


#: Numbers of a model that engines multiply by in their dtype or wider.
_FACTORS = ("embedding_multiplier", "residual_multiplier")


def _terms(site: Site) -> Mapping[str, Array] | None:
    """The two terms of the residual sum that a norm reads; None where it reads none, or it is no plain sum of them."""
    assert site.declared is not None
    read = site.near(site.declared.inputs["x"])
    producer = operation_of(site.facts.model, local_name(read))
    if producer is None or producer.kind != "residual" or site.facts.model.residual_multiplier != 1:
        return None
    layers = site.facts.model.num_layers
    x, y = (site.rows_of(near(producer.inputs[role], layer_of(read), layers)) for role in ("x", "y"))
    held = site.rows_of(read)
    if x is None or y is None or held is None or not x.shape == y.shape == held.shape:
        return None
    same = rounded(x + y, site.facts.dtype).astype(np.float64) == held
    return {"stream": x, "branch": y} if bool(same.all()) else None


def _rotation(site: Site, at: Any, x: Array, *, coarse: bool) -> Mapping[str, Any]:
    """x [N, heads, D], its other halves with their signs, and the tables, of which channels that are not rotated have
    1 and 0."""
    model, ones = site.facts.model, np.ones_like(x)
    angles = angles_of(model, site.rows)[at]
    if coarse:
        positions = np.array([row.position for row in site.rows], dtype=np.float64)[at, None, None]
        by = np.broadcast_to(frequencies(model, lengths_of(site.rows)), (len(site.rows), *angles.shape[1:]))[
            at
        ]
        angles = positions * rounded(by, site.facts.dtype).astype(np.float64)
    right = np.broadcast_to(np.pi / 2, angles.shape)
    ahead, back = (turned(model, ones, sign * angles, magnitude(model)) for sign in (1, -1))
    signs = np.where(ahead == back, 0.0, np.rint(turned(model, ones, right, 1.0)))
    half = rounded(turned(model, x, right, 1.0), site.facts.dtype).astype(
        np.float64
    )  # the cosine leaves 6e-17
    return {"x": x, "rotate_half(x)": half, "cos": (ahead + back) / 2, "sin": (ahead - back) / 2 * signs}


def _narrower(tap: str, taps: RecordedTaps, reference: RecordedTaps, dtype: str) -> bool | None:
    """Whether all of a tap's numbers are of the dtype where the reference's are wider (False: the reverse); None where
    both are alike."""
    numbers = [_some(tap, side) for side in (taps, reference)]
    held = [x is not None and on_grid(x, dtype) for x in numbers]
    return None if any(x is None for x in numbers) or held[0] == held[1] else held[0]


def _some(tap: str, taps: RecordedTaps) -> Array | None:
    """The finite numbers of one pass; None without any."""
    if not taps.captured(tap):
        return None
    first = next((x for x in taps.tensors(tap, 0) if x is not None), None)
    found = None if first is None else first[np.isfinite(first)]
    return None if found is None or not found.size else found
