"""The correct behaviour of Mamba-2 (arXiv:2405.21060). T tokens of one sequence, H heads, fewer groups of B and C.

Step sizes and what is recurrent are computed in float32.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from lockstep.engine.rules.recurrence import CHUNK, convolution


def biased_convolution(rows: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """A causal convolution of each channel, its bias, then SiLU: rows [W - 1 + T, C], whose first are those before,
    weights [C, W] and bias [C] -> [T, C]."""
    return F.silu(convolution(rows, weight, bias))


def step_size(dt: Tensor, dt_bias: Tensor, limits: tuple[float, float]) -> Tensor:
    """How far each head's state goes with a token, [T, H] float32."""
    return F.softplus(dt.float() + dt_bias.float()).clamp(*limits)


def negative_rate(a_log: Tensor) -> Tensor:
    """What step sizes are multiplied by in the exponent, [H] float32."""
    return -a_log.float().exp()


def scan(state: Tensor, x: Tensor, b: Tensor, c: Tensor, step: Tensor, rate: Tensor) -> tuple[Tensor, Tensor]:
    """x [T, H, P], B and C [T, H, N], step sizes [T, H] and rates [H] -> what is read from the state at each token
    [T, H, P], and the state after the last [H, P, N]. A token finds S·exp(step·rate), adds step x Bᵀ, and reads S C."""
    x, b, c = (one.float().transpose(0, 1) for one in (x * step.unsqueeze(-1), b, c))
    decay = (step * rate).T.unsqueeze(-1)  # [H, T, 1]
    parts = []
    for start in range(0, x.shape[1], CHUNK):
        part, state = _chunk(state, *(one[:, start : start + CHUNK] for one in (x, b, c, decay)))
        parts.append(part)
    return torch.cat(parts, 1).transpose(0, 1), state


def _chunk(state: Tensor, x: Tensor, b: Tensor, c: Tensor, decay: Tensor) -> tuple[Tensor, Tensor]:
    """The same of [H, C, …], as products of matrices."""
    total = decay.double().cumsum(1)  # [H, C, 1]; of large ones small differences count
    since = (
        (total - total.mT).tril().exp().float().tril()
    )  # [H, C, C]: what is left at i of what was written at j
    read = total.exp().float() * (c @ state.mT) + (since * (c @ b.mT)) @ x
    left = (total[:, -1:] - total).exp().float()
    return read, total[:, -1:].exp().float() * state + (x * left).mT @ b


def skip(read: Tensor, x: Tensor, d: Tensor) -> Tensor:
    """What is read from the state [T, H, P], and D times what went in."""
    return read + d.float().unsqueeze(-1) * x.float()


def through_gate(x: Tensor, gate: Tensor) -> Tensor:
    """x [T, C] times SiLU of the gate."""
    return (x.float() * F.silu(gate.float())).to(x.dtype)


def normed_first(x: Tensor, gate: Tensor, weight: Tensor, normalised: Callable[[Tensor], Tensor]) -> Tensor:
    """The norm, `normalised`, of x [T, C], its weight, and then SiLU of the gate."""
    return (weight.float() * normalised(x.float()) * F.silu(gate.float())).to(x.dtype)


def gated(x: Tensor, gate: Tensor, weight: Tensor, normalised: Callable[[Tensor], Tensor]) -> Tensor:
    """The norm, `normalised`, of x [T, C] times SiLU of the gate, and its weight."""
    return (weight * normalised(x.float() * F.silu(gate.float())).to(x.dtype)).to(x.dtype)
