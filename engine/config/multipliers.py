"""Numbers by which a model multiplies what its blocks read, give and compute between (maximal update parametrisation,
arXiv:2203.03466). Torch-free.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Multipliers:
    """What goes into attention and Mamba-2, keys, the five parts of Mamba-2's product, the MLP's gate, and what each of
    the three gives."""

    attention_in: float = 1.0
    key: float = 1.0
    attention_out: float = 1.0
    ssm_in: float = 1.0
    z: float = 1.0
    x: float = 1.0
    b: float = 1.0
    c: float = 1.0
    dt: float = 1.0
    ssm_out: float = 1.0
    gate: float = 1.0
    down: float = 1.0
