"""One of the two runs: its rows, its sequences, and the logits of every row that can be known."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lockstep.engine.graph import OUTSIDE
from lockstep.engine.graph.formula import evaluate, formula_of, numbers_of
from lockstep.workbench.diagnosis.mismatch.tokens import Line, lines
from lockstep.workbench.diagnosis.operations.facts import Facts
from lockstep.workbench.diagnosis.operations.shares import weight_names
from lockstep.workbench.diagnosis.row_sides import RowSide

Values = NDArray[np.float64]
#: Rows of logits that are held at once.
_AT_ONCE = 64
#: What the head reads.
HIDDEN = "final_norm"


@dataclass(frozen=True, slots=True)
class Side:
    """`facts` are of the checkpoint, where there is one: a recording keeps of each pass the last row of its logits, and
    the others are what the head makes of `final_norm`."""

    name: str
    rows: RowSide
    lines: tuple[Line, ...]
    facts: Facts | None = None

    @classmethod
    def of(cls, name: str, rows: RowSide, facts: Facts | None) -> Side:
        return cls(name, rows, tuple(lines(rows)), facts)

    def targets(self, line: Line) -> dict[int, int]:
        """The positions that were read, each with the token after it."""
        there = self.rows.sequences[line.seq]
        after = {line.start + index: token for index, token in enumerate(line.ids[1:])}
        return {position: token for position, token in after.items() if position in there}

    def logits(self, line: Line) -> Iterator[tuple[int, Values]]:
        """Position and logits [vocab] of the rows that have a next token; those that are known."""
        positions = sorted(self.targets(line))
        for start in range(0, len(positions), _AT_ONCE):
            yield from sorted(self.logits_at(line.seq, positions[start : start + _AT_ONCE]).items())

    def logits_at(self, seq: int, positions: list[int]) -> dict[int, Values]:
        """Logits [vocab] by position, those that are known: as recorded, else what the head makes of `final_norm`."""
        recorded = self.recorded_logits(seq, positions)
        return recorded | self._of_hidden(seq, [one for one in positions if one not in recorded])

    def recorded_logits(self, seq: int, positions: list[int]) -> dict[int, Values]:
        """By position; of most passes the last row alone is recorded."""
        if "tensor" not in self.rows.kinds("logits"):
            return {}
        recorded = self.rows.rows("logits", "tensor", seq, positions)
        return {position: row.astype(np.float64).reshape(-1) for position, row in recorded.items()}

    def _of_hidden(self, seq: int, positions: list[int]) -> dict[int, Values]:
        if not positions or "tensor" not in self.rows.kinds(HIDDEN):
            return {}
        rows = self.rows.rows(HIDDEN, "tensor", seq, positions)
        values = self.head({position: row.astype(np.float64).reshape(-1) for position, row in rows.items()})
        return {} if values is None else dict(zip(rows, values, strict=True))

    def head(self, hidden: Mapping[Any, Values]) -> Values | None:
        """[rows, vocab] that the checkpoint's head gives of rows of HIDDEN; None where it cannot."""
        if self.facts is None or not hidden:
            return None
        names = weight_names("logits", "head", self.facts)
        weights = {
            role: found for role, name in names.items() if (found := self.facts.weight(name)) is not None
        }
        if weights.keys() != names.keys() or any(
            row.size != weights["weight"].shape[1] for row in hidden.values()
        ):
            return None
        given = {**numbers_of(self.facts.model), "x": np.stack(list(hidden.values())), "bias": 0.0, **weights}
        return np.asarray(evaluate(formula_of(OUTSIDE["logits"], self.facts.model), given))
