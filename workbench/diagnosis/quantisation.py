"""Quantisation loss: what llama.cpp's arithmetic on the blocks as stored does to the logits.

For a product with quantised weights llama.cpp rounds the activations as well (to Q8_0, Q8_K or F16), whatever the
engine does. The golden session has the same blocks dequantised, so that no such loss is in it: what an engine differs
from it by beyond noise is a kernel or a loading bug, and what llama.cpp's usual numbers differ by is this.
"""

from __future__ import annotations

import math

import numpy as np

from lockstep.sessions.metrics import metrics
from lockstep.sessions.session import Session
from lockstep.workbench.diagnosis.recording import Array, Recording
from lockstep.workbench.judgements.golden_event import QuantisationLoss


def quantisation_loss(engine: Session, stored: Session, golden: Session) -> QuantisationLoss:
    """The logits of `stored` against `golden`, two runs of llama.cpp, and against the engine's, on the same tokens."""
    sides = Recording(engine), Recording(stored), Recording(golden)
    largest, relative, divergence, engine_apart = 0.0, 0.0, 0.0, math.nan
    tokens = same = 0
    for step in sides[0].steps:
        for seq in sorted(sides[0].sequences(step)):
            ours, rounded, exact = (side.whole_or_none("logits", step, seq) for side in sides)
            if rounded is None or exact is None:
                continue
            apart = metrics(rounded, exact)
            largest, relative = max(largest, apart.max_abs), max(relative, apart.rel_l2)
            divergence = max(divergence, divergence_of(exact[-1], rounded[-1]))
            tokens, same = tokens + 1, same + int(np.argmax(rounded[-1]) == np.argmax(exact[-1]))
            if ours is not None:
                engine_apart = np.fmax(engine_apart, metrics(ours, rounded).max_abs)
    return QuantisationLoss(largest, relative, divergence, tokens, same, float(engine_apart))


def divergence_of(right: Array, other: Array) -> float:
    """KL(right ‖ other) of two rows of logits, in nats."""
    p, q = right - _logsumexp(right), other - _logsumexp(other)
    return max(0.0, float(np.exp(p) @ (p - q)))


def _logsumexp(x: Array) -> float:
    top = float(x.max())
    return top + math.log(float(np.exp(x - top).sum()))
