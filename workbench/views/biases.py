"""Biases as far as a session holds them: whole in a golden session, per rank after `info weights`."""

from __future__ import annotations

import base64
import binascii
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sessions import Session
from workbench.views.rank_weights import Held, held
from workbench.views.words import mapping

_PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
_LONGEST = 1_000_000


@dataclass(frozen=True, slots=True, eq=False)
class Bias:
    """One bias. `values[heads, head_dim]` where it is known whole; `parts` are what the
    ranks hold."""

    name: str
    values: NDArray[np.float32] | None
    parts: tuple[Held, ...]


def biases(session: Session, layer: int, branch: int) -> list[Bias]:
    """The layer's biases, the ranks' as they were on `branch`; empty where the session holds none of them."""
    whole = mapping(session.meta.get("biases"))
    known = held(session.meta, branch)
    head_dim = mapping(session.meta.get("model") or session.meta.get("config")).get("head_dim")
    found = []
    for projection in _PROJECTIONS:
        block = "mlp" if projection in _PROJECTIONS[4:] else "self_attn"
        name = f"model.layers.{layer}.{block}.{projection}.bias"
        bias = Bias(name, _decoded(whole.get(name), head_dim), tuple(known.get(name, {}).values()))
        if bias.values is not None or bias.parts:
            found.append(bias)
    return found


def _decoded(text: object, head_dim: object) -> NDArray[np.float32] | None:
    """Little-endian float64 in base64, a head a row where the head's size is known."""
    if not isinstance(text, str) or len(text) > 12 * _LONGEST:
        return None
    try:
        data = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        return None
    if not data or len(data) % 8:
        return None
    flat = np.frombuffer(data, "<f8").astype(np.float32)
    width = (
        head_dim if isinstance(head_dim, int) and head_dim > 0 and flat.size % head_dim == 0 else flat.size
    )
    return flat.reshape(-1, width)
