"""Biases as far as a session holds them: whole in a golden session, per rank after `info weights`."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lockstep.sessions import Session
from lockstep.sessions.meta import WeightShare
from lockstep.workbench.views.rank_weights import rank_shares

_PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
_LONGEST = 1_000_000


@dataclass(frozen=True, slots=True, eq=False)
class Bias:
    """One bias. `values[heads, head_dim]` where it is known whole; `parts` are what the ranks hold."""

    name: str
    values: NDArray[np.float32] | None
    parts: tuple[WeightShare, ...]


def biases(session: Session, layer: int, branch: int) -> list[Bias]:
    """The layer's biases, the ranks' as they were on `branch`; empty where the session holds none of them."""
    meta = session.meta
    known = rank_shares(meta, branch)
    found = []
    for projection in _PROJECTIONS:
        block = "mlp" if projection in _PROJECTIONS[4:] else "self_attn"
        name = f"model.layers.{layer}.{block}.{projection}.bias"
        bias = Bias(
            name, _by_head(meta.biases.get(name), meta.model.head_dim), tuple(known.get(name, {}).values())
        )
        if bias.values is not None or bias.parts:
            found.append(bias)
    return found


def _by_head(data: bytes | None, head_dim: int | None) -> NDArray[np.float32] | None:
    """Little-endian float64, a head a row where the head's size is known."""
    if not data or len(data) > 8 * _LONGEST or len(data) % 8:
        return None
    flat = np.frombuffer(data, "<f8").astype(np.float32)
    return flat.reshape(-1, head_dim if head_dim and flat.size % head_dim == 0 else flat.size)
