"""What a signature may look at, and how it names the cause it found."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.taps.names import layer_of, local_name
from sessions.meta import SessionMeta
from workbench.diagnosis.dataflow import inputs_of
from workbench.diagnosis.misreadings import Misreading
from workbench.diagnosis.recording import Array, Recording
from workbench.views.causes import Cause

#: Reads a weight of the checkpoint by its name, whole; None where there is no such weight.
Weights = Callable[[str], NDArray[Any] | None]

#: Gives what a weight of the checkpoint becomes under each known mistake of loaders, whole, by the weight's name.
Misread = Callable[[str], Sequence[tuple[Misreading, NDArray[Any]]]]

#: Root-mean-square error, relative to the tensor's own, up to which a remainder is rounding.
NOISE = {"float64": 1e-6, "float32": 2e-5, "float16": 4e-3, "bfloat16": 3e-2}

#: Share of an error that a signature may leave unexplained: rounding may be a good part of a small error.
UNEXPLAINED = 0.2


@dataclass(frozen=True, slots=True)
class Evidence:
    """Both recordings, and where they part: tap, step and sequence of the first divergence.

    `ranks` are those found wrong there (empty: all). `meta` is the golden session's.
    """

    engine: Recording
    golden: Recording
    tap: str
    step: int
    seq: int
    ranks: tuple[int, ...] = ()
    weights: Weights | None = None
    meta: SessionMeta = field(default_factory=SessionMeta)
    misread: Misread | None = None

    @property
    def kind(self) -> str:
        """The tap's name within its layer."""
        return local_name(self.tap)

    def near(self, kind: str) -> str:
        """The tap of that kind in the layer of the divergence: `attn.k_rope` -> `layers.3.attn.k_rope`."""
        layer = layer_of(self.tap)
        return kind if layer is None else f"layers.{layer}.{kind}"

    def seen(self, kind: str) -> Array | None:
        """The engine's whole tensor at a tap of this layer in this step, None where there is none."""
        return self.engine.whole_or_none(self.near(kind), self.step, self.seq)

    def right(self, kind: str) -> Array | None:
        """The golden tensor at a tap of this layer in this step."""
        return self.golden.whole_or_none(self.near(kind), self.step, self.seq)

    def wrong_pair(self) -> tuple[Array, Array] | None:
        """(engine's, golden) at the divergence, if both are there with one shape and all finite."""
        seen, right = self.seen(self.kind), self.right(self.kind)
        if seen is None or right is None or seen.shape != right.shape:
            return None
        return (seen, right) if np.isfinite(seen).all() and np.isfinite(right).all() else None

    def stream(self) -> Array | None:
        """The golden residual stream that the divergent block's output is added to."""
        before = (
            self.near("attn_residual")
            if self.kind.startswith("mlp")
            else inputs_of(self.near("attn_norm"))[0]
        )
        return self.golden.whole_or_none(before, self.step, self.seq)

    def spans(self) -> list[slice]:
        """Which part of the divergent tensor's split dimension each rank holds (empty: not split)."""
        return self.engine.spans(self.tap, self.step, self.seq)

    def wrong_columns(self, width: int) -> NDArray[np.bool_]:
        """Which columns belong to the wrong ranks, [width]."""
        mask = np.zeros(width, dtype=bool)
        spans = self.spans()
        if not spans or not self.ranks:
            return ~mask
        for rank in self.ranks:
            mask[spans[rank]] = True
        return mask

    def weight_name(self, module: str, part: str) -> str:
        """Checkpoint name of `self_attn.q_proj`, `weight` in the layer of the divergence."""
        return f"model.layers.{layer_of(self.tap)}.{module}.{part}"

    def weight(self, module: str, part: str) -> Array | None:
        """That weight in float64, if the checkpoint can be read and has it."""
        found = self.weights(self.weight_name(module, part)) if self.weights else None
        return None if found is None else found.astype(np.float64)

    def bias(self, module: str) -> Array | None:
        """That module's bias, from the golden session (which keeps them) or the checkpoint."""
        data = self.meta.biases.get(self.weight_name(module, "bias"))
        return self.weight(module, "bias") if data is None else np.frombuffer(data, dtype="<f8")

    def meaning_of(self, by: float) -> str:
        """What a factor may stand for at this tap, as a clause."""
        q, ranks = self.right("attn.q_rope"), float(self.engine.ranks)
        known: dict[float, str] = {}
        if self.kind == "attn.scores" and q is not None:
            root = math.sqrt(q.shape[2])
            known = {
                root: "sqrt(head_dim): the scale is missing",
                1 / root: "1 / sqrt(head_dim): scaled twice",
            }
        elif self.kind in ("attn.o_proj", "mlp.down") and ranks > 1:
            known = {
                ranks: "the number of ranks: summed twice",
                1 / ranks: "1 / the number of ranks: averaged",
            }
        for value, text in known.items():
            if math.isclose(by, value, rel_tol=1e-2):
                return f", {text}"
        return ""

    def explains(
        self, name: str, text: str, fitted: Mapping[str, object], predicted: Array, seen: Array, right: Array
    ) -> Cause | None:
        """The cause, if `predicted` comes as near to the engine's tensor `seen` as rounding allows
        and explains what sets it apart from the golden `right`. All finite and of one shape."""
        error = float(np.linalg.norm(seen - right))
        left = float(np.linalg.norm(seen - predicted))
        scale = max(float(np.linalg.norm(right)), float(np.linalg.norm(predicted)))
        if not error > 0 or left > NOISE[self.engine.dtype] * scale or left > UNEXPLAINED * error:
            return None
        return Cause(name, text, fitted, left / error)

    def equals(
        self, name: str, text: str, fitted: Mapping[str, object], predicted: Array, seen: Array
    ) -> Cause | None:
        """The cause, if the engine's tensor is `predicted`; for tensors whose shape alone is wrong."""
        if predicted.shape != seen.shape or not np.isfinite(seen).all() or not np.isfinite(predicted).all():
            return None
        left, scale = float(np.linalg.norm(seen - predicted)), float(np.linalg.norm(predicted))
        if not scale > 0 or left > NOISE[self.engine.dtype] * scale:
            return None
        return Cause(name, text, fitted, left / scale)


#: Fits one transform; None where it does not apply or does not explain the divergence.
Signature = Callable[[Evidence], Cause | None]
