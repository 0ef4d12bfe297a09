"""Runs that are to agree: the rows that each computed for the same tokens, and the first tap at which two part."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from lockstep.engine.api import Engine, Pass
from lockstep.engine.config import ModelConfig
from lockstep.engine.graph import LAYER
from lockstep.engine.graph.operation import OF_POSITIONS
from lockstep.engine.taps.names import local_name
from lockstep.workbench.views.moved import ROUNDING
from lockstep.workbench.words.numbers import number
from lockstep.workbench.words.plain_text import plural

Array = NDArray[np.float64]

#: Taps without a row a token: of the caches the last pass has all rows.
_BY_KEY = ("attn.scores", "attn.probs", "attn.index_scores")
_CACHES = tuple(one.tap for one in LAYER.values() if one.form in OF_POSITIONS)


@dataclass(frozen=True, slots=True)
class Run:
    """The passes of one sequence of `tokens`; `emitted` are the tokens that were chosen."""

    passes: tuple[Pass, ...]
    seq: int
    tokens: tuple[int, ...]
    emitted: tuple[int, ...]
    _rows: dict[str, dict[int, Array]] = field(default_factory=dict)

    @property
    def taps(self) -> list[str]:
        """Those captured that have rows of tokens, in the order of execution."""
        specs = self.passes[0].specs
        captured = {specs[one.tap].name for one in self.passes[0].reports[0].tensors}
        names = (spec.name for spec in specs if local_name(spec.name) not in _BY_KEY)
        return [name for name in names if name in captured]

    @property
    def prefill(self) -> Run:
        """Its passes until it emits: one, or those of the prompt's chunks."""
        count = 1 + next(
            i for i, one in enumerate(self.passes) if one.sequences[self.seq].emitted is not None
        )
        return Run(self.passes[:count], self.seq, self.tokens, self.emitted[:1])

    def rows(self, tap: str) -> Mapping[int, Array]:
        """Index of the token -> what the tap held for it, put together from the ranks."""
        if tap not in self._rows:
            self._rows[tap] = self._read(tap)
        return self._rows[tap]

    def _read(self, tap: str) -> dict[int, Array]:
        found, read = {}, 0
        for one in self.passes:
            read += len(one.sequences[self.seq].ids)
            if local_name(tap) in _CACHES and one is not self.passes[-1]:
                continue
            held = np.asarray(one.tensor(tap, self.seq), dtype=np.float64)
            first = read - len(held)  # a tap of the last row alone has that of the last token
            found.update({first + i: row.ravel() for i, row in enumerate(held)})
        return found


def crowd(prompt: Sequence[int], room: int) -> list[list[int]]:
    """Requests for one batch that are unlike in length: the prompt, one that goes on after it, in at most `room`
    tokens, and its beginning."""
    longer, shorter = [*prompt, *reversed(prompt)], prompt[: max(1, len(prompt) // 3)]
    return [list(prompt), longer[:room], list(shorter)]


def changes_with_passes(model: ModelConfig) -> str:
    """Why runs of other passes need not agree; "" where they must."""
    by_length = any(model.of_layer(layer).rope_scaling.by_length for layer in range(model.num_layers))
    return "rotary frequencies follow the length of the sequence: passes matter" if by_length else ""


def run(
    engine: Engine,
    rules: Mapping[str, str],
    prompts: Sequence[Sequence[int]],
    steps: int,
    forced: Sequence[int] = (),
) -> Run:
    """Run prompts together from an empty cache, the first onto the tokens `forced`, until it has emitted `steps` + 1
    tokens. What the taps bring back was chosen before (`Engine.capture`)."""
    engine.rules(rules)
    seqs = [engine.add(ids) for ids in prompts]
    first, passes, emitted = seqs[0], list[Pass](), list[int]()
    while len(emitted) <= steps:
        given = {first: forced[len(emitted)]} if len(emitted) < len(forced) else {}
        passes.append(engine.step(given))
        reported = passes[-1].sequences[first].emitted
        emitted += [] if reported is None else [reported]
    return Run(tuple(passes), first, (*prompts[0], *emitted[:-1]), tuple(emitted))


@dataclass(frozen=True, slots=True)
class Apart:
    """Where two runs part: the first tap in the order of execution, and its first token. `error` is that of the row,
    relative to the larger of its norm and the tap's usual one; NaN where the shapes differ."""

    tap: str
    index: int
    error: float

    def in_words(self) -> str:
        """ "layers.0.attn.q_rope, token 12: off by 0.4"."""
        how = "of another shape" if math.isnan(self.error) else f"off by {number(self.error)}"
        return f"{self.tap}, token {self.index}: {how}"


def first_apart(ours: Run, theirs: Run, tolerance: float, below: int | None = None) -> Apart | None:
    """Where two runs of the same tokens differ by more than rounding; tokens that one of them lacks are left out, and
    those from the index `below` on."""
    known = set(theirs.taps)
    for tap in ours.taps:
        if tap not in known:
            continue
        mine, other = ours.rows(tap), theirs.rows(tap)
        both = sorted(index for index in set(mine) & set(other) if below is None or index < below)
        for index in both:
            if mine[index].shape != other[index].shape:
                return Apart(tap, index, math.nan)
        if not both:
            continue
        errors = _errors(np.stack([mine[i] for i in both]), np.stack([other[i] for i in both]))
        if (wrong := np.flatnonzero(~(errors <= tolerance))).size:
            return Apart(tap, both[int(wrong[0])], float(errors[wrong[0]]))
    return None


def other_bits(ours: Run, theirs: Run) -> tuple[str, str, str]:
    """What was compared, where two runs first differ in a bit, and at which tap; "" where they do not."""
    for i, (one, two) in enumerate(zip(ours.passes, theirs.passes, strict=True)):
        places = np.flatnonzero((one.checksums != two.checksums).any(axis=0))
        if places.size:
            tap = one.specs[places[0]].name
            return "", f"{tap}, step {i}: other bits", tap
    return f"every tap of {plural(len(ours.passes), 'step')}", "", ""


def _errors(a: Array, b: Array) -> Array:
    """Of each row; infinite where the two are not finite in the same places."""
    odd = (np.isfinite(a) != np.isfinite(b)).any(axis=1)
    a, b = (np.where(np.isfinite(x), x, 0.0) for x in (a, b))
    norms = np.linalg.norm(a, axis=1)
    usual = math.sqrt(float(np.mean(norms**2))) or 1.0
    found = np.linalg.norm(a - b, axis=1) / np.maximum(norms, usual)
    return np.asarray(np.where(odd, np.inf, found))


def tolerance(dtype: str) -> float:
    """By how much rows may differ where sums run in another order, after all layers of a deep model."""
    return min(100 * ROUNDING[dtype], 0.25)
