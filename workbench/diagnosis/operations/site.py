"""A site: one operation on one rank, with all that was recorded of it over every step and sequence.

    for site in sites(taps, facts):
        if isinstance(site, Unjudged): ...

`Site.operation` names it: embedding, norm, linear, rope, keys, values, cache, scores, softmax, context, reduce,
residual, activation, head; and of engines that record nothing in between, weights (probabilities from q and k),
attention (contexts from q, k and v) and mixture (the sum of experts from what goes into them). Row-wise operations have
one part, whose rows are all tokens of all steps and sequences one below the other; those of attention and its cache
have a part for each pass of each sequence.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from lockstep.engine.graph import Operation, Width, operation_of
from lockstep.engine.graph.formula import FORMULAS, formula_of
from lockstep.engine.taps.flow import near
from lockstep.engine.taps.names import layer_of, local_name, operation_at
from lockstep.workbench.diagnosis.operations.deviation import Deviation, Part, locate
from lockstep.workbench.diagnosis.operations.facts import Facts
from lockstep.workbench.diagnosis.operations.recorded import RecordedTaps, Row
from lockstep.workbench.diagnosis.recording import Array

#: Operation -> its axis of tokens and its axis of heads (None: it has none); a `*_proj` folds heads into columns.
AXES: Mapping[str, tuple[int, int | None]] = {
    "scores": (1, 0),
    "softmax": (1, 0),
    "index_scores": (1, None),
    "weights": (1, 0),
    "rope": (0, 1),
    "keys": (0, 1),
    "values": (0, 1),
    "cache": (0, 1),
    "state": (0, 1),
    "ssm_state": (0, 1),
}


@dataclass(frozen=True, eq=False)
class Site:
    """One operation at one tap on `rank`, which stands for `ranks`: their inputs and outputs are bit-equal.

    `span` is the part of the whole tensor's split dimension that the rank holds (of heads where it has heads, else of
    columns), `columns` the part of the in features that it multiplies; None where nothing is split. `passes` index
    `taps.passes`. `weights` are checkpoint names by role: weight, bias. `held` are the experts that the rank has,
    None: all.
    """

    tap: str
    operation: str
    rank: int
    ranks: tuple[int, ...]
    parts: tuple[Part, ...]
    facts: Facts
    taps: RecordedTaps
    passes: tuple[int, ...]
    weights: Mapping[str, str] = field(default_factory=dict)
    span: slice | None = None
    columns: slice | None = None
    held: range | None = None

    @cached_property
    def derived(self) -> dict[type[Any], Any]:
        """What several banks of hypotheses make of it, by its class: made once."""
        return {}

    @property
    def declared(self) -> Operation | None:
        """The model's own operation; None of a model that is not known."""
        return None if self.facts.model_free else operation_of(self.facts.model, self.kind)

    @property
    def plain(self) -> bool:
        """Whether it computes what operations of its kind do in most models."""
        declared = self.declared
        return declared is None or formula_of(declared, self.facts.model) == FORMULAS[declared.kind]

    @property
    def kind(self) -> str:
        """The tap's name within its layer."""
        return local_name(self.tap)

    @property
    def layer(self) -> int | None:
        return layer_of(self.tap)

    @property
    def rows(self) -> tuple[Row, ...]:
        """The tokens of a row-wise operation."""
        return self.parts[0].rows

    @property
    def inputs(self) -> Mapping[str, Array]:
        """Of a row-wise operation: [N, …] each."""
        return self.parts[0].inputs

    @property
    def seen(self) -> Array:
        """Of a row-wise operation: [N, …]."""
        return self.parts[0].seen

    @property
    def expected(self) -> Array:
        """Of a row-wise operation: [N, …]."""
        return self.parts[0].expected

    @property
    def first_out(self) -> int:
        """The first element of the whole tensor's split dimension that this rank holds."""
        return 0 if self.span is None else int(self.span.start)

    @property
    def first_in(self) -> int:
        """The first in feature that this rank multiplies."""
        return 0 if self.columns is None else int(self.columns.start)

    @property
    def token_axis(self) -> int:
        return AXES.get(self.operation, (0, None))[0]

    @property
    def head_axis(self) -> int | None:
        """The axis of heads, if the tensor has one."""
        if self.operation in ("norm", "unit_norm") and self.expected.ndim == 3:
            return 1
        return AXES.get(self.operation, (0, None))[1]

    @property
    def head_columns(self) -> int | None:
        """Columns per head where heads lie side by side in the last axis."""
        model, declared = self.facts.model, self.declared or operation_at(self.tap)
        wide: dict[Width, int] = {
            "heads": model.head_dim,
            "kv_heads": model.head_dim,
            "value_heads": model.value_dim,
            "expanded_heads": 0 if model.latent is None else model.latent.expanded_dim,
        }
        folded = declared is not None and declared.form in ("rows", "cached_rows")
        return wide.get(declared.width) if declared is not None and folded else None

    @cached_property
    def deviation(self) -> Deviation | None:
        """Where it is wrong; None where it is right within rounding."""
        rows_of_experts = self.operation == "experts" and self.expected.ndim == 3
        return locate(self.parts, self.token_axis, self.head_axis, self.head_columns, rows_of_experts)

    @property
    def wrong_passes(self) -> set[tuple[int, int]]:
        """(step, sequence) of the passes in which it is wrong: a cache's rows are those of its keys, which other passes
        have written."""
        if self.deviation is None:
            return set()
        if len(self.parts) == len(self.passes):
            pairs = zip(self.passes, self.deviation.scopes, strict=True)
            chosen = [self.taps.passes[i] for i, scope in pairs if scope.any()]
            return {(one.step, one.seq) for one in chosen}
        return {(row.step, row.seq) for row in self.deviation.rows}

    def near(self, kind: str) -> str:
        """The tap of that kind in the same layer; `<` is the stream that enters the layer."""
        return near(kind, self.layer, self.facts.model.num_layers)

    def rows_of(self, tap: str, rank: int | None = None) -> Array | None:
        """Any recorded tap (a full name) at the same passes, of this rank or another; None where it lacks."""
        return self.taps.rows(tap, self.rank if rank is None else rank, self.passes)


@dataclass(frozen=True, slots=True)
class Unjudged:
    """An operation that cannot be judged, and why."""

    tap: str
    rank: int
    reason: str
