"""Rules by which an engine may count positions: what a token knows of itself, plus a number times another such thing.

The positions that tokens were rotated by are solved for first (`Phases.positions`); a rule has to give all of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from lockstep.workbench.diagnosis.operations.recorded import Row
from lockstep.workbench.diagnosis.recording import Array

Mask = NDArray[np.bool_]
#: Bits of the mantissa of dtypes in which positions may be held, the first one included.
_DIGITS = {"bfloat16": 8, "float16": 11}


@dataclass(frozen=True, slots=True)
class PositionRule:
    """Positions [N] by a rule; `name` of the cause, `fitted` its numbers."""

    name: str
    text: str
    at: Array
    fitted: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True)
class TokenPlaces:
    """Where each of N tokens stands: the step that read it, its sequence, its position there; and the windows of the
    model's layers, in tokens, whose caches keep no more."""

    step: NDArray[np.int64]
    seq: NDArray[np.int64]
    position: Array
    windows: Sequence[int] = ()

    @classmethod
    def of(cls, rows: Sequence[Row], windows: Sequence[int] = ()) -> TokenPlaces:
        found = np.array([(row.step, row.seq, row.position) for row in rows], dtype=np.int64).reshape(-1, 3)
        return cls(found[:, 0], found[:, 1], found[:, 2].astype(np.float64), windows)

    def _numbered(self, groups: NDArray[np.int64]) -> Array:
        """Each token's number within its group."""
        found = np.zeros(len(groups))
        for group in np.unique(groups):
            there = np.flatnonzero(groups == group)
            found[there] = np.arange(len(there))
        return found

    @cached_property
    def in_pass(self) -> Array:
        """Each token's number among those of its sequence in its step."""
        return self._numbered(self.step * (int(self.seq.max(initial=0)) + 1) + self.seq)

    @cached_property
    def in_batch(self) -> Array:
        """Each token's number among all of its step, sequence after sequence."""
        return self._numbered(self.step)

    @cached_property
    def steps(self) -> Array:
        return np.asarray(self.step - self.step.min(initial=0), dtype=np.float64)

    @cached_property
    def prompt(self) -> Array:
        """How many tokens of each one's sequence the first step read."""
        first = self.steps == 0
        return np.array([float((first & (self.seq == seq)).sum()) for seq in self.seq])

    @cached_property
    def padding(self) -> Array:
        """By how many tokens each one's prompt is shorter than the longest."""
        return np.asarray(self.prompt.max(initial=0.0) - self.prompt)

    @cached_property
    def from_the_last(self) -> Array:
        """Each pass of a sequence counted backwards, between the same positions."""
        found = self.position.copy()
        for step, seq in set(zip(self.step.tolist(), self.seq.tolist(), strict=True)):
            mine = (self.step == step) & (self.seq == seq)
            found[mine] = self.position[mine][::-1]
        return found

    def of_sequence(self, seq: int) -> Array:
        """The positions of another sequence's tokens, each by its number in its pass; its own where that has none."""
        found = self.position.copy()
        other = self.seq == seq
        for i in range(len(found)):
            same = np.flatnonzero(other & (self.step == self.step[i]) & (self.in_pass == self.in_pass[i]))
            found[i] = self.position[same[0]] if len(same) else found[i]
        return found

    @cached_property
    def of_batch(self) -> Array:
        """The sum of the positions of all tokens that stand at the same place of their pass."""
        keys = self.step * (int(self.in_pass.max(initial=0)) + 1) + self.in_pass.astype(np.int64)
        return np.array([float(self.position[keys == key].sum()) for key in keys])


def rules(places: TokenPlaces, found: Array, wrong: Mask, within: float) -> Iterator[PositionRule]:
    """The simplest rules that give the positions `found` [N] at the tokens that are `wrong`, each to `within` a
    position."""
    near = np.round(2 * found) / 2
    found = np.where(np.abs(near - found) <= within, near, found)
    kinds = (_kept, _constant, _counted, _functions, _shifted, _scaled, _drifting, _of_several)
    for kind in kinds:
        fitting = [
            rule
            for rule in kind(places, found, wrong)
            if (np.abs(rule.at - found)[wrong] <= within).all()
            and (np.abs(rule.at - places.position)[wrong] > 0).all()
        ]
        yield from fitting
        if fitting:
            return


def _kept(p: TokenPlaces, found: Array, wrong: Mask) -> Iterator[PositionRule]:
    """In decode, the number of keys that a layer with a window keeps of those before."""
    at = float(np.round(np.median(found[wrong]), 6))
    for window in p.windows:
        if at in (window - 1, window) and (p.steps[wrong] > 0).all() and (p.position[wrong] > at).all():
            text = (
                f"decode tokens stand no further than at {at:g}: positions count the keys that a layer keeps for its "
                f"window of {window}, not the tokens that were read"
            )
            kept = np.where(p.steps > 0, np.minimum(p.position, at), p.position)
            yield PositionRule("positions_of_window", text, kept, {"window": window, "last": at})


def _constant(p: TokenPlaces, found: Array, wrong: Mask) -> Iterator[PositionRule]:
    """One position for all tokens, or all beyond one."""
    at = float(np.round(np.median(found[wrong]), 6))
    decode = bool((p.steps[wrong] > 0).all())
    clamped = at > 0 and bool((wrong == (p.position > at)).all())
    if clamped and not (decode and np.array_equal(np.unique(p.prompt) - 1, [at])):
        text = f"positions beyond {at:g} are taken for {at:g}: the table of angles ends there"
        yield PositionRule("positions_clamped", text, np.minimum(p.position, at), {"last": at})
    elif decode and at == 0:
        text = "decode tokens are rotated as if they stood at position 0"
        yield PositionRule("position_stuck", text, 0 * p.position, {"position": 0.0})
    elif len(np.unique(p.position[wrong])) > 1:
        text = f"all tokens are rotated as if they stood at position {at:g}"
        yield PositionRule("position_stuck", text, 0 * p.position + at, {"position": at})
    if decode:
        text = "decode tokens are all rotated as the prompt's last token: the position is not advanced"
        last = np.where(p.steps > 0, p.prompt - 1, p.position)
        yield PositionRule("position_stuck", text, last, {"position": "end of prompt"})


def _counted(p: TokenPlaces, found: Array, wrong: Mask) -> Iterator[PositionRule]:
    """Other counts of the tokens."""
    if (p.in_pass[wrong] > 0).any():
        text = "positions start again at 0 in every step: what is cached is not counted"
        yield PositionRule("positions_restart", text, p.in_pass, {"restart": "step"})
    if len(np.unique(p.seq)) > 1:
        text = "positions are counted through the packed batch, across sequences"
        yield PositionRule("positions_of_batch", text, p.in_batch, {"count": "batch"})
        for other in np.unique(p.seq).tolist():
            text = f"tokens are rotated by the positions of sequence {other}"
            at = p.of_sequence(other)
            yield PositionRule("positions_of_other_sequence", text, at, {"sequence": other})
        text = "tokens are rotated by the sum of the positions of the batch's sequences"
        yield PositionRule("positions_summed", text, p.of_batch, {"count": "sum"})
    text = "positions run backwards, from the last to the first"
    yield PositionRule("positions_reversed", text, p.from_the_last, {"order": "reversed"})


def _functions(p: TokenPlaces, found: Array, wrong: Mask) -> Iterator[PositionRule]:
    """Functions of the right position: cut off, or rounded."""
    off = (p.position - found)[wrong]
    if (off > 0).all() and (size := float(np.round(off.min()))) > 1:
        text = f"positions start again at 0 after every {size:g} tokens"
        yield PositionRule("positions_restart", text, p.position % size, {"restart": size})
    for dtype, digits in _DIGITS.items():
        unit = 2.0 ** (np.floor(np.log2(np.maximum(p.position, 1))) - digits + 1)
        at = np.round(p.position / unit) * unit  # numpy rounds halves to even, as the dtypes do
        text = f"positions are rounded to {dtype}: neighbouring tokens share one"
        yield PositionRule("positions_rounded", text, at, {"dtype": dtype})
    if (p.steps[wrong] > 0).all():
        text = "decode tokens move by one position in every other step"
        at = np.where(p.steps > 0, p.prompt + p.steps // 2 - 1, p.position)
        yield PositionRule("positions_every_other", text, at, {"every": 2})
        yield PositionRule("positions_every_other", text, at + 1, {"every": 2})
    for last in np.unique(p.steps[wrong])[:4].tolist():
        text = f"decode tokens keep the position of step {last - 1:g}: it is not advanced after that"
        at = p.position - np.maximum(p.steps - last + 1, 0)
        yield PositionRule("positions_stop", text, at, {"after": last - 1})


def _shifted(p: TokenPlaces, found: Array, wrong: Mask) -> Iterator[PositionRule]:
    """A number too many or too few, of all tokens or by the padding of their prompts."""
    by = float(np.round(np.median((found - p.position)[wrong]), 6))
    if by:
        text = f"tokens stand {_count(by)} too {'far' if by > 0 else 'early'}"
        yield PositionRule("position_offset", text, p.position + by, {"offset": by})
    if p.padding.any():
        text = (
            "each sequence stands as far too far as its prompt is shorter than the longest: "
            "padded positions are counted"
        )
        yield PositionRule("positions_padded", text, p.position + p.padding, {"padding": "prompt"})


def _scaled(p: TokenPlaces, found: Array, wrong: Mask) -> Iterator[PositionRule]:
    here, used = p.position[wrong], found[wrong]
    if len(np.unique(here)) < 2:
        return
    by = float(here @ used / max(float(here @ here), 1e-300))
    plain = round(by) if by >= 1 else 1 / round(1 / by) if by > 0 else 0.0
    by = plain if plain and abs(plain / by - 1) < 1e-3 else by
    if by > 0:
        words = f"multiplied by {by:g}" if by >= 1 else f"divided by {1 / by:g}"
        yield PositionRule("positions_scaled", f"positions are {words}", p.position * by, {"factor": by})


def _drifting(p: TokenPlaces, found: Array, wrong: Mask) -> Iterator[PositionRule]:
    """An error that grows with the step."""
    steps = p.steps[wrong]
    if len(np.unique(steps)) < 2:
        return
    each = float(np.round(np.median((found - p.position)[wrong] / np.maximum(steps, 1)), 6))
    text = f"each step counts {_count(each)} too {'many' if each > 0 else 'few'}: the error grows"
    yield PositionRule("positions_drift", text, p.position + each * p.steps, {"per_step": each})


def _of_several(p: TokenPlaces, found: Array, wrong: Mask) -> Iterator[PositionRule]:
    """Each sequence shifted by its own number."""
    at, by = p.position.copy(), {}
    for seq in np.unique(p.seq[wrong]).tolist():
        mine = p.seq == seq
        by[str(seq)] = float(np.round(np.median((found - p.position)[mine & wrong]), 6))
        at[mine] += by[str(seq)]
    if len(set(by.values())) > 1:
        words = ", ".join(f"{value:+g} in sequence {seq}" for seq, value in by.items())
        text = f"positions are shifted by sequence: {words}"
        yield PositionRule("position_offset", text, at, {"offsets": by})


def _count(by: float) -> str:
    return f"{abs(by):g} position{'s' * (abs(by) != 1)}"
