"""What linear attention, Mamba-2 and gated attention should have given on recorded inputs.

The rate of decay, normalised queries and keys, and states are float32 in engines of any dtype.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import numpy as np

from lockstep.engine.config import ModelConfig
from lockstep.engine.graph.formula import numbers_of
from lockstep.engine.graph.recurrence import by_heads, convolved
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


def step_size(o: Operands) -> Result:
    """How far the states of Mamba-2 go: the rounding of the sum inside, and of softplus."""
    dt_bias = o.weight("dt_bias").astype(np.float64)
    out = o.value("step_size", dt_bias=dt_bias)
    inside = np.abs(o.inputs["x"]) + np.abs(dt_bias)
    return out, floor(o.facts, UNIT["float32"] * (4 * np.abs(out) + inside))


def l2_norm(o: Operands) -> Result:
    """Each head over its length."""
    out = o.value("l2_norm")
    return out, floor(o.facts, 4 * o.facts.unit * np.abs(out))


def gated_norm(o: Operands) -> Result:
    """RMSNorm of each head or group, its weight, and the gate's SiLU, each rounded."""
    out = o.value("gated_norm", weight=o.weight().astype(np.float64))
    return out, floor(o.facts, 4 * o.facts.unit * np.abs(out))


def own_group(inputs: Mapping[str, Array], model: ModelConfig, span: slice | None) -> dict[str, Array]:
    """Of what all ranks give to the gated norm of Mamba-2 the columns of the group that this rank has a part of."""
    if model.mamba is None or span is None or "whole_gate" not in inputs:
        return {}
    width = model.mamba.norm_width
    first = span.start // width * width
    return {
        role: inputs[role][:, first : first + width] if inputs[role].shape[1] > width else inputs[role]
        for role in ("whole", "whole_gate")
    }


def conv(o: Operands) -> Result:
    """The convolution's sums, and SiLU of what is left of them where there is one."""
    weight, x, before = o.weight(), o.inputs["x"], o.inputs["before"]
    if x.shape[-1] != len(weight):
        raise Lacking(f"its input of shape {list(x.shape)} does not fit {len(weight)} channels")
    bias = 0.0 if (added := o.bias()) is None else added
    out, inside = o.value("conv", weight=weight, bias=bias), convolved(before, x, weight) + bias
    terms = convolved(np.abs(before), np.abs(x), np.abs(weight)) + np.abs(bias)
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


def ssm_state(o: Operands) -> Result:
    """The state of Mamba-2 after the last token."""
    out = o.value("ssm_state", A_log=o.weight("A_log").astype(np.float64))
    return out, floor(o.facts, np.broadcast_to(_scan_noise(o)[:, None, None], out.shape))


def ssm_read(o: Operands) -> Result:
    """What is read from those states after each token, and the skip."""
    vectors = {role: o.weight(role).astype(np.float64) for role in ("A_log", "D")}
    out = o.value("ssm_read", **vectors)
    heads, numbers = len(vectors["D"]), numbers_of(o.facts.model)
    largest = (
        np.abs(by_heads(o.inputs["c"], numbers["state_dim"])).sum(-1).max(0, initial=0.0)
    )  # of each group
    of_states = _scan_noise(o) * np.repeat(largest, heads // len(largest))
    skipped = np.abs(by_heads(o.inputs["x"], numbers["ssm_dim"]) * vectors["D"][:, None]).reshape(out.shape)
    noise = o.facts.unit * np.abs(out) + UNIT["float32"] * skipped
    return out, floor(o.facts, noise + np.repeat(of_states, out.shape[1] // heads))


def _scan_noise(o: Operands) -> Array:
    """What rounding may come to in a state of Mamba-2, by head: of the size of the largest that it may have been."""
    before, step, numbers = o.inputs["before"], o.inputs["step"], numbers_of(o.facts.model)
    values = np.abs(by_heads(o.inputs["x"], numbers["ssm_dim"])).max(-1) * step  # [T, H]
    keys = np.abs(by_heads(o.inputs["b"], numbers["state_dim"])).max(-1)
    added = values * np.repeat(keys, step.shape[1] // keys.shape[1], axis=1)
    size = np.abs(before).max((1, 2), initial=0.0) + added.max(0, initial=0.0) * min(len(step), _SUMMED)
    summed = (step * np.exp(o.weight("A_log").astype(np.float64)))[:_SUMMED].sum(0)
    return np.asarray(UNIT["float32"] * (8 + 2 * math.sqrt(len(step)) + np.minimum(summed, 64)) * size)


#: Row-wise ones.
GATES: Mapping[str, Callable[[Operands], Result]] = {
    "gate": gate,
    "times": times,
    "sigmoid": sigmoid,
    "decay": decay,
    "l2_norm": l2_norm,
    "step_size": step_size,
    "gated_norm": gated_norm,
}
#: Those that meet what earlier passes of their sequence have left, as the input `before`.
RECURRENT: Mapping[str, Callable[[Operands], Result]] = {
    "conv": conv, "state": state, "delta": delta, "ssm_state": ssm_state, "ssm_read": ssm_read,
}  # fmt: skip
