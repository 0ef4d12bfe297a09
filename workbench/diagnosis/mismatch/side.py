"""One of the two runs: its rows, its sequences, and the logits of every row that can be known."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lockstep.engine.graph import OUTSIDE
from lockstep.engine.graph.formula import evaluate, formula_of, numbers_of
from lockstep.workbench.diagnosis.mismatch.tokens import Line, lines
from lockstep.workbench.diagnosis.operations.facts import Facts
from lockstep.workbench.diagnosis.operations.shares import HEAD
from lockstep.workbench.diagnosis.row_sides import RowSide

Values = NDArray[np.float64]
#: Rows of logits that are held at once.
_AT_ONCE = 64
_HIDDEN = "final_norm"


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
            wanted = positions[start : start + _AT_ONCE]
            found: dict[int, Values] = {}
            if "tensor" in self.rows.kinds("logits"):
                recorded = self.rows.rows("logits", "tensor", line.seq, wanted)
                found = {position: row.astype(np.float64).reshape(-1) for position, row in recorded.items()}
            found |= self._of_hidden(line, [position for position in wanted if position not in found])
            yield from sorted(found.items())

    def _of_hidden(self, line: Line, positions: list[int]) -> dict[int, Values]:
        weight = None if self.facts is None else self.facts.weight(HEAD)
        if self.facts is None or weight is None or not positions or "tensor" not in self.rows.kinds(_HIDDEN):
            return {}
        rows = self.rows.rows(_HIDDEN, "tensor", line.seq, positions)
        if not rows or any(row.size != weight.shape[1] for row in rows.values()):
            return {}
        given = {"x": np.stack([row.astype(np.float64).reshape(-1) for row in rows.values()])}
        formula = formula_of(OUTSIDE["logits"], self.facts.model)
        values = evaluate(formula, {**numbers_of(self.facts.model), **given, "weight": weight, "bias": 0.0})
        return dict(zip(rows, values, strict=True))
