"""What `check` and `golden` leave in a session's journal: the judgement of a branch, with its causes.

The verdict of each tap is a row of the session's verdicts; this is what they come to. A number that is not finite is
null in the file.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import msgspec
import numpy as np

from lockstep.sessions import Session
from lockstep.sessions.records import JSON
from lockstep.sessions.text import clean
from lockstep.workbench.judgements.cause import NO_CAUSE, Cause
from lockstep.workbench.judgements.coverage import Coverage
from lockstep.workbench.words.numbers import number

#: The kind of the event.
KIND = "golden"

#: Routing flips that are reported one by one.
_FLIPS = 3
#: What is to be done about them.
_SUGGESTED = "how much of the difference comes of them: `lockstep check MODEL --replay-routing ids`"
#: Characters of a foreign text that are kept.
_TEXT = 800


class Divergence(msgspec.Struct, frozen=True):
    """The first operation that went wrong, and how.

    `ranks` are the ranks whose part is wrong; `rank` is the first of them, None where all are wrong.
    """

    tap: str
    layer: int | None = None
    step: int = 0
    seq: int = 0
    rank: int | None = None
    ranks: tuple[int, ...] = ()
    max_abs: float | None = None
    rel_l2: float | None = None
    cosine: float | None = None
    reason: str = ""

    def in_words(self) -> str:
        """ "layers.0.attn.q_proj at step 0, rank 1: 12 times the noise floor"."""
        rank = "" if self.rank is None else f", rank {self.rank}"
        return f"{self.tap} at step {self.step}{rank}: {self.reason}"


class Faulty(msgspec.Struct, frozen=True):
    """An operation that errs on golden inputs, where it does so first: its relative L2 error, and that over the
    floor (infinite where shapes or non-finite elements differ)."""

    tap: str
    step: int = 0
    seq: int = 0
    injected: float | None = None
    ratio: float | None = None


class TokenMismatch(msgspec.Struct, frozen=True):
    """A step at which the engine's likeliest token is not the reference's. `tie`: the reference itself
    could not distinguish the two at this dtype."""

    step: int
    seq: int
    engine: int
    reference: int
    margin: float | None = None
    tie: bool = False


class RoutingFlip(msgspec.Struct, frozen=True):
    """A token that goes to other experts than the reference's, or whose query attends to other keys, as two were
    equally good within rounding: its step, sequence and position, the experts or keys that it chose (`taken`) and those
    that the reference chose in their place (`lost`). `margin`: how much better the reference's were, by its own scores;
    `rounding`: by how much one rounding of their logits moves those. `origin`: the operation from which on what the
    token's row is off by turns the choice. None and "" where they cannot be stated. `follows`: operations of the step
    and sequence that differ by what follows.
    """

    tap: str
    step: int = 0
    seq: int = 0
    position: int = 0
    taken: tuple[int, ...] = ()
    lost: tuple[int, ...] = ()
    margin: float | None = None
    rounding: float | None = None
    origin: str = ""
    follows: int = 0

    def in_words(self) -> str:
        """Where, which experts, by how little, and since when."""
        taken, lost = (", ".join(map(str, one)) for one in (self.taken, self.lost))
        at = f"{self.tap} at step {self.step}, sequence {self.seq}, position {self.position}"
        words = f"{at}: {'key' if '.attn.' in self.tap else 'expert'} {taken} for {lost}"
        if self.margin is not None and self.rounding:
            words += f", which scored {number(self.margin)} more: {self.margin / self.rounding:.2g} roundings"
        if self.origin:
            words += f"; turned by what {self.origin} is off by"
        return words if not self.follows else f"{words}; {self.follows} operations of the step follow from it"


class RoutingReplay(msgspec.Struct, frozen=True):
    """What became of a run's next tokens when the reference's routing was `forced` onto it, "ids" or the experts'
    "weights" as well: their KL divergence from the reference's in nats, on average, before and after."""

    forced: str
    before: float | None = None
    after: float | None = None

    def in_words(self) -> str:
        """What share of the difference goes."""
        what = "experts" if self.forced == "ids" else "experts and their weights"
        words = f"with the reference's {what} forced onto the engine, KL is {number(self.after)} instead of "
        words += number(self.before)
        if not self.before or self.after is None:
            return words
        return f"{words}: {max(0.0, 1 - self.after / self.before):.0%} of it comes of other routing"


class QuantisationLoss(msgspec.Struct, frozen=True):
    """What llama.cpp's own arithmetic on quantised blocks loses against the same blocks dequantised: it rounds the
    activations to 8 or 16 bits for it. Largest over the `tokens` of all steps and sequences: the difference of the
    logits, their KL divergence in nats; how many tokens stay the `same`; and `engine_max_abs`, how far the engine's
    logits are from those of the blocks as stored."""

    max_abs: float | None = None
    rel_l2: float | None = None
    kl: float | None = None
    tokens: int = 0
    same: int = 0
    engine_max_abs: float | None = None

    def in_words(self, matches: bool) -> str:
        """What quantisation does and what it does not."""
        lost = (
            f"llama.cpp on the blocks as stored is off by max abs {number(self.max_abs)} (relative "
            f"{number(self.rel_l2)}, KL {number(self.kl)}), {self.same} of {self.tokens} tokens the same: its rounding "
            "of activations"
        )
        if matches:
            engine = number(self.engine_max_abs)
            return f"{lost}. The engine is off that by {engine}, and right on the blocks dequantised"
        return (
            f"{lost}. The verdict is against the same blocks dequantised: what diverges is no quantisation loss but a "
            "kernel or a loading bug"
        )


class UntappedRun(msgspec.Struct, frozen=True, kw_only=True):
    """The same passes with no tap on inside the attention, as `generate` makes them. The largest differences of its
    logits from the reference's, and from those of the run with taps. `first` is where it is wrong and the other is
    not."""

    verdict: Literal["match", "diverged"]
    max_abs_logits: float | None = None
    max_abs_tapped: float | None = None
    first: Divergence | None = None


class GoldenEvent(msgspec.Struct, frozen=True, kw_only=True):
    """One judgement of a branch over `steps` forward passes, of which the first `prefill` read prompts: "inconclusive"
    where nothing is wrong, but the reference
    overflows at the engine's dtype, first at `overflow`. `max_abs_logits` is against the reference at the engine's
    own dtype where there is one. `tokens_identical`: None where not all could be compared. `tolerance` is "floor"
    (the reference's own error at that dtype) or "fixed". `causes` explain the first divergence, best first; `faulty`
    are the operations that are wrong by themselves (None: that was not asked), `ledger` states them in words.
    `flips` are tokens that went to other experts within rounding, of a great many the first.
    `golden_session` is a file's name, `reference` the library that recorded it; `quantisation` is known where that is
    llama.cpp and blocks are quantised. `confirmed` are the rules in force ("NAME=VALUE") of which it was tried that
    the run matches without them, and only then. `coverage` is what the verdict on a recording rests on, and may be
    why it is inconclusive. `untried` are taps that are wrong and of which not every hypothesis was tried, for want of
    time or because a search failed."""

    verdict: Literal["match", "diverged", "inconclusive"]
    coverage: Coverage | None = None
    max_abs_logits: float | None = None
    tokens_identical: bool | None = None
    untapped: UntappedRun | None = None
    overflow: Divergence | None = None
    first_divergence: Divergence | None = None
    tp: int = 1
    tolerance: Literal["floor", "fixed"] = "floor"
    token_mismatches: tuple[TokenMismatch, ...] = ()
    flips: tuple[RoutingFlip, ...] = ()
    replay: RoutingReplay | None = None
    notes: tuple[str, ...] = ()
    faulty: tuple[Faulty, ...] | None = None
    steps: int = 0
    prefill: int = 1
    words: str = ""
    ledger: str = ""
    causes: tuple[Cause, ...] = ()
    rules: Mapping[str, str] = {}
    golden_session: str = ""
    reference: str = "transformers"
    quantisation: QuantisationLoss | None = None
    confirmed: tuple[str, ...] = ()
    untried: tuple[str, ...] = ()

    @property
    def matches(self) -> bool:
        """Whether the engine does what the reference does."""
        return self.verdict == "match"

    @property
    def remarks(self) -> tuple[str, ...]:
        """What else is to be known of the judgement, in words: what that of a recording rests on, the notes, and of
        llama.cpp what quantisation costs."""
        loss, rests = self.quantisation, self.coverage
        notes = (
            self.notes
            if rests is None
            else (rests.in_words(), *filter(None, [self.unsupported]), *self.notes)
        )
        notes = (*notes, *self.flips_in_words())
        return notes if loss is None else (*notes, loss.in_words(self.matches))

    def flips_in_words(self) -> tuple[str, ...]:
        """The first routing flips, how many more there are, and what the reference's routing changes."""
        reported = tuple(flip.in_words() for flip in self.flips[:_FLIPS])
        if more := len(self.flips) - len(reported):
            reported += (f"and {more} more tokens went to other experts or keys within rounding",)
        if self.replay is not None:
            return (*reported, self.replay.in_words())
        return (*reported, _SUGGESTED) if reported else reported

    @property
    def unsupported(self) -> str:
        """Why a recording does not carry a verdict; "" where it does."""
        if self.coverage is None or self.verdict != "inconclusive":
            return ""
        return self.coverage.misplaced or self.coverage.lacking

    def causes_in_words(self) -> list[str]:
        """The causes, best first; a sentence where none is known."""
        return [cause.in_words() for cause in self.causes] or [NO_CAUSE]


def compared_by(name: str) -> str:
    """The command that holds another engine's recording against a reference, and writes the verdict into a copy."""
    return f"lockstep check {name} --model MODEL --save JUDGED.session"


def plain(value: object) -> JSON:
    """Structs and dataclasses as plain JSON values; what is not a finite number is null."""
    return msgspec.json.decode(msgspec.json.encode(value, enc_hook=_number))


def _number(value: object) -> float:
    if isinstance(value, np.number):
        return float(value)
    raise NotImplementedError(f"{type(value).__name__} is no JSON")


def golden_events(session: Session, branch: int) -> list[GoldenEvent]:
    """The judgements of a branch, oldest first. An event that is none (a stranger may have written it) is left out,
    and texts are cleaned."""
    found = (_read(event.data) for event in session.events(branch=branch, kind=KIND))
    return [event for event in found if event is not None]


def last_golden_event(session: Session, branch: int) -> GoldenEvent | None:
    """The newest judgement of a branch; None where it was never judged."""
    return next(reversed(golden_events(session, branch)), None)


def _read(data: JSON) -> GoldenEvent | None:
    try:
        return msgspec.convert(_cleaned(data), GoldenEvent)
    except (msgspec.ValidationError, RecursionError):
        return None


def _cleaned(value: JSON) -> JSON:
    if isinstance(value, str):
        return clean(value, limit=_TEXT)
    if isinstance(value, list):
        return [_cleaned(one) for one in value]
    if isinstance(value, dict):
        return {clean(str(key), limit=_TEXT): _cleaned(one) for key, one in value.items()}
    return value
