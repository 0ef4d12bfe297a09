"""A mixture of experts that an engine runs in one kernel: what it should have given of what was recorded before it.

Where the experts' own rows were not recorded the sum is judged as one operation: the formulas of all between it and
what was recorded, one in the other. Leaves are called by their taps: `mlp_norm`, `mlp.topk_ids`; weights by tap and
role.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from lockstep.engine.config import ModelConfig
from lockstep.engine.errors import ConfigError
from lockstep.engine.graph import LAYER, Operation, operation_of
from lockstep.engine.graph.formula import Node, formula_of, substitute
from lockstep.engine.parallel import shards
from lockstep.engine.parallel.sizes import size_of
from lockstep.workbench.diagnosis.operations.expected import ROW_WISE, Lacking, Operands, Result
from lockstep.workbench.diagnosis.operations.experts import (
    choice,
    choice_weights,
    combine,
    expert_input,
    expert_matrices,
    experts,
    hit,
    near_ties,
)
from lockstep.workbench.diagnosis.operations.facts import spread
from lockstep.workbench.diagnosis.recording import Array

#: The operation that stands for all of them, and the taps at which it is judged.
MIXTURE, ROOTS = "mixture", ("mlp.combine.partial", "mlp.combine")
_OPERATIONS: Mapping[str, Callable[[Operands], Result]] = {
    **ROW_WISE, "choice": choice, "choice_weights": choice_weights, "experts": experts, "combine": combine,
    "expert_input": expert_input,
}  # fmt: skip
OUTPUT = "mlp.experts.down"
_ROLES = ("weight", "bias", "correction", "expert_scale")
#: The parts of a model whose operations are computed within it.
_PARTS = ("experts", "weighed_inputs", "shared_expert", "shared_gate")


def term_of(model: ModelConfig) -> Operation:
    """The operation that sums up what a token's experts give."""
    return operation_of(model, ROOTS[0]) or LAYER[ROOTS[0]]


def experts_read(model: ModelConfig) -> str:
    """The tap of what goes into the experts, weighed or not."""
    tap = "mlp.experts.up"
    while (found := operation_of(model, tap) or LAYER[tap]).part in _PARTS:
        tap = found.inputs["x"]
    return tap


def read_by(model: ModelConfig, has: Callable[[str], bool]) -> tuple[str, ...]:
    """The taps that it is judged from: the nearest ones that the recording has; what lacks is named too."""
    return tuple(dict.fromkeys(_read(term_of(model), model, has)))


def _read(operation: Operation, model: ModelConfig, has: Callable[[str], bool]) -> Iterator[str]:
    for tap in operation.inputs.values():
        before = operation_of(model, tap)
        if has(tap) or before is None or before.part not in _PARTS:
            yield tap
        else:
            yield from _read(before, model, has)


def inside(model: ModelConfig, given: Collection[str]) -> tuple[Operation, ...]:
    """The operations that are computed within it, in their order, the sum last."""
    found: dict[str, Operation] = {}

    def visit(operation: Operation) -> None:
        for tap in operation.inputs.values():
            before = operation_of(model, tap)
            if tap not in given and before is not None:
                visit(before)
        found[operation.tap] = operation

    visit(term_of(model))
    return tuple(found.values())


def mixture_formula(model: ModelConfig, given: Collection[str]) -> Node:
    """All of it as one formula of what is given."""
    trees: dict[str, Node] = {}
    for one in inside(model, given):
        own = formula_of(one, model)
        if one.kind == "linear" and not (one.bias and getattr(model, one.bias)):
            own = own.args[0]
        leaves = {role: trees.get(tap, Node(tap)) for role, tap in one.inputs.items()}
        trees[one.tap] = substitute(own, {role: Node(f"{one.tap}.{role}") for role in _ROLES} | leaves)
    return trees[ROOTS[0]]


@dataclass(frozen=True, eq=False)
class MixtureValues:
    """What each operation within gives, and how far rounding may move it. `operands` are those of the whole: inputs by
    tap, `weights` by tap and role, of experts with `{}` for the number of one, `span` the rank's features of each."""

    operands: Operands

    @cached_property
    def operations(self) -> Mapping[str, Operation]:
        """By tap, in their order."""
        return {one.tap: one for one in inside(self.operands.facts.model, self.operands.inputs)}

    @cached_property
    def results(self) -> Mapping[str, Result]:
        """Of each tap within: value and noise."""
        found: dict[str, Result] = {tap: (x, np.zeros(1)) for tap, x in self.operands.inputs.items()}
        for tap, one in self.operations.items():
            given = {role: found[read][0] for role, read in one.inputs.items()}
            o = self.of(one, given)
            value, noise = _OPERATIONS[one.kind](o)
            for role, read in one.inputs.items():
                if found[read][1].any():
                    noise = np.hypot(noise, _through(o, one, role, value, found[read][1]))
            found[tap] = value, noise
        return found

    def of(self, one: Operation, given: Mapping[str, Array]) -> Operands:
        """One operation within, on its inputs by role."""
        o, start = self.operands, f"{one.tap}."
        weights = {
            name.removeprefix(start): weight for name, weight in o.weights.items() if name.startswith(start)
        }
        if not is_first(one, o):
            weights.pop("bias", None)
        span, columns = (None, o.span) if one.tap == OUTPUT else (o.span, None)
        if one.kind != "experts":
            span = columns = None
        return replace(o, facts=o.facts.of_tap(one.tap), inputs=given, weights=weights, span=span, columns=columns,
                       declared=one)  # fmt: skip

    @cached_property
    def outputs(self) -> tuple[Array, Array]:
        """The experts' numbers [N, S], and what each gives a token, [N, S, H]."""
        return self.results["mlp.topk_ids"][0], self.results[OUTPUT][0]

    def output_of_all(self, rows: NDArray[np.intp]) -> Array:
        """What every expert that the rank has gives those rows' tokens, [N, E, H]; zeros of others."""
        model = self.operands.facts.model
        count = 0 if model.experts is None else model.experts.count
        read = experts_read(model)
        x, some = self.operands.inputs[read][rows], replace(self.operands, inputs={})
        values = MixtureValues(
            replace(
                some,
                inputs={
                    read: x,
                    "mlp.topk_ids": np.broadcast_to(np.arange(float(count)), (len(x), count)),
                    "mlp.topk_weights": np.ones((len(x), count)),
                    **{tap: self.results[tap][0][rows] for tap in ("mlp.shared.down", "mlp.shared_gate")
                       if tap in self.results},
                },
            )
        )  # fmt: skip
        return values.results[OUTPUT][0]

    def matrices(self, name: str, ids: Array) -> Mapping[int, Array]:
        """Of those experts that the rank has its part of the tensor of that tap and role."""
        o = self.operands
        found = expert_matrices(o.facts, o.weights[name], hit(ids, o.held))
        if o.span is None:
            return found
        of_output = name.startswith(OUTPUT)
        if name.endswith(".bias"):
            return found if of_output else {one: x[o.span] for one, x in found.items()}
        return {one: x[:, o.span] if of_output else x[o.span] for one, x in found.items()}


def is_first(one: Operation, o: Operands) -> bool:
    """Whether the rank adds the bias of a term that is summed over the ranks."""
    return not one.summed or o.span is None or o.span.start == 0


def _through(o: Operands, one: Operation, role: str, value: Array, noise: Array) -> Array:
    """What the noise of an input comes to behind the operation."""
    x = o.inputs[role]
    if role in ("logits", "ids"):
        return np.asarray(2 * np.abs(value) * noise.max(-1, keepdims=True))
    if one.kind == "experts":
        return _through_experts(o, value, np.broadcast_to(noise, x.shape))
    if one.kind == "linear":
        return spread(np.broadcast_to(noise, x.shape), o.weight())
    if one.kind == "combine" and role == "x":
        weights = o.inputs.get("weights", np.ones(x.shape[:2]))
        return np.asarray(np.sqrt(np.einsum("nsh,ns->nh", noise**2, weights**2)))
    if one.kind == "combine" and role == "weights":
        off = np.broadcast_to(noise, x.shape)
        return np.asarray(np.sqrt(np.einsum("nsh,ns->nh", o.inputs["x"] ** 2, off**2)))
    moved = replace(o, inputs={**o.inputs, role: x + noise})
    return np.abs(moved.value(one.kind) - value)


def _through_experts(o: Operands, value: Array, noise: Array) -> Array:
    ids, out = o.inputs["ids"], np.zeros_like(value)
    for expert, matrix in expert_matrices(o.facts, o.weights["weight"], hit(ids, o.held)).items():
        part = matrix if o.span is None else matrix[o.span]
        part = part if o.columns is None else part[:, o.columns]
        here = ids == expert
        out[here] = spread(noise[here], part)
    return out


def expert_placements(
    model: ModelConfig, ranks: int, rank: int
) -> Iterator[tuple[int, slice | None, range | None]]:
    """Every way in which the experts may lie on the ranks: among how many groups they are divided, and of a rank the
    features of each expert and the experts that it has (None: all)."""
    for groups in (one for one in range(1, ranks + 1) if ranks % one == 0):
        try:
            held = shards.held_experts(model, ranks, rank, groups)
        except ConfigError:  # they do not divide
            continue
        size = ranks // groups
        part = shards.cropped(size_of("expert", model), size, rank % size)
        span = slice(part.start, part.stop) if size > 1 else None
        yield groups, span, range(held.start, held.stop) if groups > 1 else None


def mixture(o: Operands) -> Result:
    """The weighted sum of what a token's experts give, and the shared one's, of what was recorded before."""
    if experts_read(o.facts.model) not in o.inputs:
        raise Lacking("the input of the experts was not recorded")
    return MixtureValues(o).results[ROOTS[0]]


def undecided(o: Operands) -> NDArray[np.bool_]:
    """The rows whose choice was not recorded and is one of two within rounding."""
    values = MixtureValues(o)
    choosing = values.operations.get("mlp.topk_ids")
    if choosing is None:
        return np.zeros(len(o.rows), dtype=bool)
    logits = values.results[choosing.inputs["logits"]]
    return near_ties(values.of(choosing, {"logits": logits[0]}), logits[1])
