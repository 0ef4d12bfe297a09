"""The logit lens of a step: what each layer would choose if the final norm and the output head came right after it.

The `lens` command leaves a `LensEvent` in the journal; panes and the command show it as `LensLayer`s.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated

import msgspec

from lockstep.engine.taps.names import layer_of
from lockstep.sessions import Session
from lockstep.sessions.text import clean
from lockstep.workbench.views.candidates import Candidate, probability
from lockstep.workbench.views.source import SessionSource
from lockstep.workbench.views.token_texts import TokenTexts
from lockstep.workbench.views.where import Where

#: The kind of the event.
KIND = "lens"


class LensRow(msgspec.Struct, frozen=True):
    """What the residual of the sequence's last position after one tap would choose, best first. A number that is not
    finite is None."""

    tap: str
    ids: Annotated[tuple[int, ...], msgspec.Meta(min_length=1, max_length=64)]
    logits: tuple[float | None, ...]
    logsumexp: float | None = None
    entropy: float | None = None

    def __post_init__(self) -> None:
        if len(self.ids) != len(self.logits):
            raise ValueError("each candidate has a logit")


class LensEvent(msgspec.Struct, frozen=True):
    """The rows of the embedding and every layer; `golden` are those of the reference's own residuals under the same
    norm and head, None where there is no reference."""

    seq: int
    layers: Annotated[tuple[LensRow, ...], msgspec.Meta(max_length=1024)]
    golden: tuple[LensRow, ...] | None = None

    def __post_init__(self) -> None:
        if self.golden is not None and len(self.golden) != len(self.layers):
            raise ValueError("the reference has a row for each layer")


@dataclass(frozen=True, slots=True)
class LensLayer:
    """One layer's candidates, best first. `place` is where the token that was emitted stands among them, from 0
    (None: not among them); `golden` are the candidates of the reference's own row."""

    tap: str
    name: str
    candidates: tuple[Candidate, ...]
    entropy: float
    place: int | None
    golden: tuple[Candidate, ...]


@dataclass(frozen=True, slots=True)
class Lens:
    """The layers from the embedding on. None of them: nobody has looked at this step."""

    step: int
    emitted: str | None
    layers: tuple[LensLayer, ...]

    @property
    def settled(self) -> LensLayer | None:
        """The first layer from which on every layer has the emitted token first."""
        found = None
        for layer in reversed(self.layers):
            if layer.place != 0:
                break
            found = layer
        return found


def lens(source: SessionSource, where: Where) -> Lens:
    """The newest lens of the step at `where`."""
    if where.step not in source.session.steps(where.branch):
        return Lens(where.step, None, ())
    reported = source.sequence(where.step, where.branch, where.seq)
    emitted = reported.emitted if reported is not None else None
    event = recorded_lens(source.session, where.branch, where.step, where.seq)
    return Lens(
        where.step,
        None if emitted is None else source.texts.label(emitted),
        () if event is None else lens_layers(event, source.texts, emitted),
    )


def recorded_lens(session: Session, branch: int, step: int, seq: int = 0) -> LensEvent | None:
    """The newest lens event of a step of the branch; what a stranger wrote that is none is left out."""
    events = session.events(branch=session.owner(step, branch), step=step, kind=KIND)
    for event in reversed(events):
        try:
            found = msgspec.convert(event.data, LensEvent)
        except msgspec.ValidationError:
            continue
        if found.seq == seq:
            return found
    return None


def lens_layers(event: LensEvent, texts: TokenTexts, emitted: int | None) -> tuple[LensLayer, ...]:
    """The event's rows as they are shown."""
    return tuple(
        LensLayer(
            tap := clean(row.tap, limit=120),
            tap if (layer := layer_of(tap)) is None else f"layer {layer}",
            _candidates(row, texts, emitted),
            _read(row.entropy),
            row.ids.index(emitted) if emitted in row.ids else None,
            () if event.golden is None else _candidates(event.golden[i], texts, emitted),
        )
        for i, row in enumerate(event.layers)
    )


def _read(recorded: float | None) -> float:
    """A number of the event: null stands for one that was not finite."""
    return math.nan if recorded is None else recorded


def _candidates(row: LensRow, texts: TokenTexts, emitted: int | None) -> tuple[Candidate, ...]:
    found, total = [], _read(row.logsumexp)
    for token, recorded in zip(row.ids, row.logits, strict=True):
        logit = _read(recorded)
        found.append(Candidate(texts.label(token), token, probability(logit, total), logit, token == emitted))
    return tuple(found)
