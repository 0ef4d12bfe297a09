"""What models do to the product of the head: a divisor, a soft cap (cap * tanh(logits / cap)); another one, or none."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from lockstep.engine.graph.formula import Node, product
from lockstep.workbench.diagnosis.hypotheses.edits import Edit, node_at
from lockstep.workbench.diagnosis.hypotheses.trial import RowTrial
from lockstep.workbench.diagnosis.operations.expected import sum_noise
from lockstep.workbench.diagnosis.recording import Array

#: The leaf of a head's formula that is the cap.
CAP = "logit_cap"
#: What logits are divided by.
DIVISOR = "logit_divisor"
#: Those of published models; another one is solved for.
OF_LOGITS: Mapping[str, Sequence[float]] = {CAP: (30.0, 50.0), DIVISOR: ()}


def without_cap(formula: Node, edit: Edit) -> bool:
    """Whether an edit leaves the cap out."""
    return _left_out(formula, edit).name == "tanh"


def undivided(formula: Node, edit: Edit) -> bool:
    """Whether an edit leaves the divisor out."""
    return _left_out(formula, edit).args[1:] == (Node(DIVISOR),)


def _left_out(formula: Node, edit: Edit) -> Node:
    """The node that an edit leaves out; a leaf without a name where it does something else."""
    at = edit.place
    return Node("") if edit.kind != "left_out" or isinstance(at, str) else node_at(formula, at)


def uncapped_noise(trial: RowTrial) -> Array:
    """What the rounding of logits may come to where no cap flattens it: [rows, vocabulary]."""
    site, weight = trial.site, trial.matrices["weight"].astype(np.float64)
    x = site.inputs["x"]
    terms = np.sqrt(product(np.square(x), np.square(weight)))
    unit = 2 * site.facts.unit + sum_noise(site.facts, x.shape[1])
    return np.asarray(unit * np.hypot(product(x, weight), terms) / abs(site.facts.model.logit_divisor))
