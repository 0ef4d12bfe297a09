"""Causes at the activation and at the output head."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from workbench.diagnosis.recording import Array
from workbench.diagnosis.signatures.evidence import Evidence, Signature
from workbench.diagnosis.signatures.linear import factor
from workbench.diagnosis.signatures.loading import head_misread
from workbench.views.causes import Cause


def head_untrained(e: Evidence) -> Cause | None:
    """The logits are noise of the size that a head at its initial values gives, or all zero."""
    rows = [_logits(e, step) for step in e.engine.steps]
    found = [row for row in rows if row is not None]
    if not found or e.wrong_pair() is None:
        return None
    seen, right = (np.concatenate(parts) for parts in zip(*found, strict=True))
    if not seen.any():
        return Cause("head_zero", "all logits are zero: the output head was never filled", {}, 0.0)
    std = e.meta.model.initializer_range or 0.02
    ratio = float(np.sqrt((seen**2).mean())) / std
    cosine = float((seen * right).sum() / (np.linalg.norm(seen) * np.linalg.norm(right)))
    spread = 5 / np.sqrt(seen.size)  # five standard errors of both estimates, at least
    if abs(cosine) > spread or abs(ratio - 1) > spread:
        return None
    text = f"the logits are noise of size {std:g} * |final_norm|: the output head is at its initial values"
    return Cause("head_untrained", text, {"std": std, "cosine": cosine}, abs(ratio - 1))


def _logits(e: Evidence, step: int) -> tuple[Array, Array] | None:
    """(engine's, golden) logits of a step, over the norm of the hidden state that they are made from."""
    seen, right = e.engine.whole_or_none("logits", step, e.seq), e.golden.whole_or_none("logits", step, e.seq)
    hidden = e.engine.whole_or_none("final_norm", step, e.seq)
    if seen is None or right is None or hidden is None or seen.shape != right.shape:
        return None
    length = float(np.linalg.norm(hidden[-1]))
    return (seen / length, right / length) if np.isfinite(seen).all() and length > 0 else None


def head_is_hidden(e: Evidence) -> Cause | None:
    """The final hidden state is passed off as logits."""
    seen, hidden = e.seen("logits"), e.right("final_norm")
    if seen is None or hidden is None or seen.shape[-1] != hidden.shape[-1]:
        return None
    return e.equals("head_is_hidden", "the logits are the final hidden state: there is no output head",
                    {"width": hidden.shape[-1]}, hidden[-len(seen) :], seen)  # fmt: skip


def head_from_embedding(e: Evidence) -> Cause | None:
    """The input embedding serves as the head of a model that has one of its own."""
    pair, hidden = e.wrong_pair(), e.seen("final_norm")
    embedding = e.weights("model.embed_tokens.weight") if e.weights else None
    if pair is None or hidden is None or embedding is None:
        return None
    return e.explains("head_from_embedding", "the embedding is used as the output head, which is a matrix of its own",
                      {}, hidden[-1:] @ embedding.astype(np.float64).T, *pair)  # fmt: skip


def other_activation(e: Evidence) -> Cause | None:
    """gate and up are right; another function of them was computed."""
    pair, gate, up = e.wrong_pair(), e.seen("mlp.gate"), e.seen("mlp.up")
    if pair is None or gate is None or up is None or gate.shape != pair[0].shape:
        return None
    candidates = {
        "silu(up) * gate": _silu(up) * gate,
        "gelu(gate) * up (tanh)": _gelu_tanh(gate) * up,
        "gelu(gate) * up": _gelu(gate) * up,
        "relu(gate) * up": np.maximum(gate, 0) * up,
        "gate * up": gate * up,
        "silu(gate)": _silu(gate),
    }
    found = [
        e.explains(
            "other_activation", f"{formula} is computed instead of silu(gate) * up", {"is": formula}, x, *pair
        )
        for formula, x in candidates.items()
    ]
    return min(filter(None, found), key=lambda cause: cause.unexplained, default=None)


def _silu(x: Array) -> Array:
    return np.asarray(x / (1 + np.exp(-np.clip(x, -700, 700))))


def _gelu(x: Array) -> Array:
    return np.asarray(0.5 * x * (1 + np.vectorize(math.erf)(x / math.sqrt(2))))


def _gelu_tanh(x: Array) -> Array:
    return np.asarray(0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))))


OUTPUT: Mapping[str, tuple[Signature, ...]] = {
    "mlp.act": (other_activation, factor),
    "logits": (head_misread, head_untrained, head_is_hidden, head_from_embedding, factor),
}
