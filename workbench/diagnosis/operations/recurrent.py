"""What linear attention and gated attention should have given on recorded inputs.

The rate of decay, normalised queries and keys, and states are float32 in engines of any dtype.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import numpy as np

from lockstep.engine.graph.recurrence import convolved
from lockstep.workbench.diagnosis.operations.expected import Lacking, Operands, Result, floor, sum_noise
from lockstep.workbench.diagnosis.operations.facts import UNIT
from lockstep.workbench.diagnosis.recording import Array

#: Tokens whose decays an engine may add up before it takes the exponential.
_SUMMED = 64


def gate(o: Operands) -> Result:
    """What attention gives, through its gate: a sigmoid and a product."""
    out = o.value("gate")
    return out, floor(o.facts, 3 * o.facts.unit * np.abs(out))


def times(o: Operands) -> Result:
    """What goes into a short convolution, or comes out of it, times its gate."""
    out = o.value("times")
    return out, floor(o.facts, o.facts.unit * np.abs(out))


def sigmoid(o: Operands) -> Result:
    out = o.value("sigmoid")
    return out, floor(o.facts, 2 * o.facts.unit * np.abs(out))


def decay(o: Operands) -> Result:
    """The logarithm of what is left of a state: the rounding of its exponential and of the sum inside."""
    a_log, dt_bias = (o.weight(role).astype(np.float64) for role in ("A_log", "dt_bias"))
    out = o.value("decay", A_log=a_log, dt_bias=dt_bias)
    inside = np.abs(o.inputs["x"]) + np.abs(dt_bias)
    relative = (4 + np.abs(a_log)) * np.abs(out) + np.exp(a_log) * inside
    return out, floor(o.facts, UNIT["float32"] * relative)


def l2_norm(o: Operands) -> Result:
    """Each head over its length."""
    out = o.value("l2_norm")
    return out, floor(o.facts, 4 * o.facts.unit * np.abs(out))


def gated_norm(o: Operands) -> Result:
    """RMSNorm of each head, its weight, and the gate's SiLU, each rounded."""
    out = o.value("gated_norm", weight=o.weight().astype(np.float64))
    return out, floor(o.facts, 4 * o.facts.unit * np.abs(out))


def conv(o: Operands) -> Result:
    """The convolution's sums, and SiLU of what is left of them where there is one."""
    weight, x, before = o.weight(), o.inputs["x"], o.inputs["before"]
    if x.shape[-1] != len(weight):
        raise Lacking(f"its input of shape {list(x.shape)} does not fit {len(weight)} channels")
    out, inside = o.value("conv", weight=weight), convolved(before, x, weight)
    terms = convolved(np.abs(before), np.abs(x), np.abs(weight))
    noise = (o.facts.unit + sum_noise(o.facts, weight.shape[1])) * np.abs(inside) + o.facts.sum_unit * terms
    return out, floor(o.facts, 1.1 * noise + 2 * o.facts.unit * np.abs(out))


def state(o: Operands) -> Result:
    """The state after the last token."""
    out = o.value("state")
    return out, floor(o.facts, np.broadcast_to(_noise(o, out)[:, None, None], out.shape))


def delta(o: Operands) -> Result:
    """What is read from the states after each token."""
    out = o.value("delta")
    heads = o.inputs["beta"].shape[1]
    read = out.reshape(len(out), heads, -1).swapaxes(0, 1)
    of_states = np.repeat(_noise(o, read), out.shape[1] // heads)
    return out, floor(o.facts, o.facts.unit * np.abs(out) + of_states)


def _noise(o: Operands, out: Array) -> Array:
    """What rounding may come to in a state, by head: of the size of the largest value that it was, held or gives
    (`out` [H, …]), for each token; and where decays are added up, of their sum."""
    before, beta = o.inputs["before"], o.inputs["beta"]
    values = o.inputs["v"].reshape(len(beta), beta.shape[1], -1)
    size = np.abs(before).max((1, 2), initial=0.0) + np.linalg.norm(values, axis=-1).max(0, initial=0.0)
    size = size + np.abs(out).max((1, 2), initial=0.0)
    summed = np.abs(o.inputs["decay"][:_SUMMED]).sum(0)
    return np.asarray(UNIT["float32"] * (8 + 2 * math.sqrt(len(beta)) + summed) * size)


#: Row-wise ones.
GATES: Mapping[str, Callable[[Operands], Result]] = {
    "gate": gate,
    "times": times,
    "sigmoid": sigmoid,
    "decay": decay,
    "l2_norm": l2_norm,
    "gated_norm": gated_norm,
}
#: Those that meet what earlier passes of their sequence have left, as the input `before`.
RECURRENT: Mapping[str, Callable[[Operands], Result]] = {"conv": conv, "state": state, "delta": delta}
