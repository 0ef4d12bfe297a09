"""Causes in how weights were read from the checkpoint's file."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from workbench.diagnosis.dataflow import GATE_UP, MODULES, QKV
from workbench.diagnosis.misreadings import Misreading
from workbench.diagnosis.recording import Array
from workbench.diagnosis.signatures.evidence import Evidence, Signature
from workbench.views.causes import Cause

#: Tap kind -> what a projection multiplies.
_INPUT = {
    **dict.fromkeys(QKV, "attn_norm"),
    **dict.fromkeys(GATE_UP, "mlp_norm"),
    "attn.o_proj": "attn.context",
    "mlp.down": "mlp.act",
}


def misread(e: Evidence) -> Cause | None:
    """The weight or the bias is what a known mistake makes of the file's bytes."""
    pair, x = e.wrong_pair(), e.seen(_INPUT[e.kind])
    if pair is None or x is None or e.misread is None:
        return None
    bias = e.bias(MODULES[e.kind])
    right = e.weight(MODULES[e.kind], "weight")
    for name, misreading, read in _misread(e, e.weight_name(MODULES[e.kind], "weight")):
        for added in _biases(e, bias):
            found = _named(e, name, misreading, x @ read.T + added, pair)
            if found:
                return found
    for name, misreading, read in _misread(e, e.weight_name(MODULES[e.kind], "bias")):
        found = None if right is None else _named(e, name, misreading, x @ right.T + read, pair)
        if found:
            return found
    return None


def _biases(e: Evidence, bias: Array | None) -> Iterator[Array | float]:
    """What may be added to a product whose weight was misread: the bias, also as the same mistake makes it."""
    yield 0.0 if bias is None else bias
    for _, _, read in _misread(e, e.weight_name(MODULES[e.kind], "bias")):
        yield read


def embedding_misread(e: Evidence) -> Cause | None:
    """The embedding is what a known mistake makes of the file's bytes."""
    pair, sequence = e.wrong_pair(), e.engine.sequences(e.step).get(e.seq)
    if pair is None or sequence is None or e.misread is None:
        return None
    for name, misreading, read in _misread(e, "model.embed_tokens.weight"):
        found = _named(e, name, misreading, read[list(sequence.ids)], pair)
        if found:
            return found
    return None


def head_misread(e: Evidence) -> Cause | None:
    """The output head is what a known mistake makes of the file's bytes."""
    pair, hidden = e.wrong_pair(), e.seen("final_norm")
    if pair is None or hidden is None or e.misread is None:
        return None
    for name, misreading, read in _misread(e, "lm_head.weight"):
        found = _named(e, name, misreading, hidden[-1:] @ read.T, pair)
        if found:
            return found
    return None


def _misread(e: Evidence, name: str) -> Iterator[tuple[str, Misreading, Array]]:
    for misreading, read in e.misread(name) if e.misread else ():
        yield name, misreading, read.astype(np.float64)


def _named(
    e: Evidence, name: str, misreading: Misreading, predicted: Array, pair: tuple[Array, Array]
) -> Cause | None:
    how, words = misreading
    if predicted.shape != pair[0].shape or not np.isfinite(predicted).all():
        return None
    return e.explains(
        "misread", f"{name} is misread: {words}", {"tensor": name, "how": how}, predicted, *pair
    )


LOADING: Mapping[str, tuple[Signature, ...]] = {"embed": (embedding_misread,)}
