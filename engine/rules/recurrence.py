"""The correct behaviour of linear attention: Gated DeltaNet (arXiv:2412.06464) as Qwen3-Next and Qwen3.5 have it.

T tokens of one sequence, H heads of values, fewer of keys. What is recurrent is computed in float32.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from lockstep.engine.config.linear_attention import L2_EPS
from lockstep.engine.kv.states import LayerState

#: Tokens whose updates of a state are made at once.
CHUNK = 64


def convolution(rows: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """A causal convolution of each channel: rows [W - 1 + T, C], whose first are those before, weights [C, W] and a
    bias [C] -> [T, C]."""
    out: Tensor = F.conv1d(rows.T.unsqueeze(0), weight.unsqueeze(1), bias, groups=len(weight))
    return out[0].T


def short_convolution(rows: Tensor, weight: Tensor) -> Tensor:
    """The same, then SiLU."""
    return F.silu(convolution(rows, weight))


def through_gate(x: Tensor, gate: Tensor) -> Tensor:
    """What goes into a short convolution [T, C], or comes out of it, times its gate."""
    return x * gate


def newest_rows(rows: Tensor, count: int) -> Tensor:
    """What the convolution keeps for the next pass, of rows [W - 1 + T, C]: the last `count` = W - 1."""
    return rows[len(rows) - count :].clone()


def l2_normalised(x: Tensor) -> Tensor:
    """Each head of queries or keys [T, heads, D] over its length, in float32."""
    wide = x.float()
    return wide * torch.rsqrt(wide.square().sum(-1, keepdim=True) + L2_EPS)


def update_rate(b: Tensor) -> Tensor:
    """How much of what a state has wrong about a value is put right, [T, H], from 0 to 1."""
    return b.sigmoid()


def log_decay(a: Tensor, a_log: Tensor, dt_bias: Tensor) -> Tensor:
    """The logarithm of what is left of a state from one token to the next, [T, H] float32 (Mamba-2,
    arXiv:2405.21060)."""
    return -a_log.float().exp() * F.softplus(a.float() + dt_bias)


def shared_by_neighbours(keys: Tensor, heads: int) -> Tensor:
    """Queries or keys [T, key_heads, D] for each of `heads` heads of values."""
    return keys.repeat_interleave(heads // keys.shape[1], 1)


def carried(held: LayerState | None, left: LayerState | None, fresh: LayerState, new: int) -> LayerState:
    """The state that a pass over `new` tokens of a sequence begins with: what it `held`, or a `fresh` one, never what
    was `left` in the layer by another sequence."""
    return fresh if held is None else held


def as_computed(state: Tensor) -> Tensor:
    """How a state [H, D, V] is kept: in float32."""
    return state


def delta_rule(
    state: Tensor, q: Tensor, k: Tensor, v: Tensor, beta: Tensor, decay: Tensor
) -> tuple[Tensor, Tensor]:
    """Queries and keys [T, H, D], values [T, H, V], rates and decays [T, H] -> what is read from the state at each
    token [T, H, V], and the state after the last [H, D, V]. A token finds S·exp(decay), changes it by
    k (beta (v - k S))ᵀ, and reads q S / √D."""
    q, k, v = (x.float().transpose(0, 1) for x in (q * q.shape[-1] ** -0.5, k, v))
    beta, decay = (x.float().T.unsqueeze(-1) for x in (beta, decay))
    parts = []
    for start in range(0, q.shape[1], CHUNK):
        part, state = _chunk(state, *(x[:, start : start + CHUNK] for x in (q, k, v, beta, decay)))
        parts.append(part)
    return torch.cat(parts, 1).transpose(0, 1), state


def _chunk(
    state: Tensor, q: Tensor, k: Tensor, v: Tensor, beta: Tensor, decay: Tensor
) -> tuple[Tensor, Tensor]:
    """The same of [H, C, …], as products of matrices: what each token corrects depends on the corrections before it,
    a triangular system (arXiv:2406.06484)."""
    total = decay.double().cumsum(1)  # [H, C, 1]; of large ones small differences count
    since = (
        (total - total.mT).tril().exp().float().tril()
    )  # [H, C, C]: what is left at i of what was written at j
    found = total.exp().float()
    wrong = beta * (v - found * (k @ state))
    if k.shape[1] > 1:
        system = beta * since * (k @ k.mT)
        wrong = torch.linalg.solve_triangular(system, wrong, upper=False, unitriangular=True)
    read = found * (q @ state) + (since * (q @ k.mT)) @ wrong
    left = (total[:, -1:] - total).exp().float()
    return read, found[:, -1:] * state + (k * left).mT @ wrong


def gated_norm(x: Tensor, weight: Tensor, gate: Tensor, eps: float) -> Tensor:
    """RMSNorm of each head, then times SiLU of the gate: x and gate [T, H, V] -> the same."""
    normalised = F.rms_norm(x.float(), x.shape[-1:], None, eps).to(x.dtype)
    return (weight * normalised * F.silu(gate.float())).to(x.dtype)


def times_sigmoid(context: Tensor, gate: Tensor) -> Tensor:
    """What attention gives [T, heads * D], through its gate (arXiv:2505.06708)."""
    return context * gate.sigmoid()
