"""Where an operation is, as far as its hypotheses name it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from lockstep.engine.config import ModelConfig
from lockstep.engine.graph.formula import Node
from lockstep.workbench.diagnosis.hypotheses.fits import differing_replica
from lockstep.workbench.diagnosis.hypotheses.operands import formula_at
from lockstep.workbench.diagnosis.operations.site import Site


@dataclass(frozen=True, slots=True)
class Wording:
    """`name` is a stable id, `kind` the class of bug, `text` one sentence, `fitted` what it is about."""

    name: str
    kind: str
    text: str
    fitted: Mapping[str, object]


@dataclass(frozen=True, slots=True)
class Setting:
    """What a sentence needs to know of where an operation is.

    `channels` are the only wrong columns where these are few; `replica`: the copies of other ranks are right.
    `ranks` is how many there are, `first` the rank's first (out feature, in feature) of the whole, `size` how many it
    has of each. `row`: how many columns of a norm's row the rank has, and all ranks. `seen`: of several places
    together, whether tensors are reported as seen from each layer, or by their own.
    """

    operation: str
    kind: str
    layer: int | None
    model: ModelConfig
    formula: Node
    weight: str
    bias: str
    channels: tuple[int, ...]
    replica: str
    rank: int
    ranks: int
    first: tuple[int, int]
    size: tuple[int, int]
    split_rows: bool
    row: tuple[int, int] = (0, 0)
    seen: Literal["", "from each", "by itself"] = ""

    @classmethod
    def of(cls, site: Site) -> Setting:
        columns = site.deviation.columns if site.deviation is not None else None
        x, whole = site.inputs.get("x"), site.inputs.get("whole")
        width = site.parts[0].expected.shape[-1]
        return cls(
            site.operation, site.kind, site.layer, site.facts.model, formula_at(site),
            site.weights.get("weight", ""), site.weights.get("bias", ""),
            tuple(site.first_out + one for one in columns or ()), differing_replica(site),
            site.rank, len(site.taps.ranks), (site.first_out, site.first_in),
            (width, 0 if x is None else x.shape[-1]), site.columns is None,
            (width, width) if x is None or whole is None else (x.shape[-1], whole.shape[-1]),
        )  # fmt: skip

    @property
    def layers(self) -> int:
        return self.model.num_layers

    @property
    def branch(self) -> str:
        """Whose output a residual sum adds."""
        return {"attn_residual": "attention", "mlp_residual": "MLP"}.get(self.kind, "block")
