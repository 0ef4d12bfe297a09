"""What the layers would have chosen at a step, as the `lens` command left it in the session."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from engine.taps.names import layer_of
from sessions.text import clean
from workbench.views.source import Source
from workbench.views.where import Where

#: The most layers and candidates of one that are believed of a foreign session.
_LAYERS, _CANDIDATES = 1024, 20


@dataclass(frozen=True, slots=True)
class Guess:
    """A candidate of a layer; `probability` is None where it is not a number."""

    token: int
    label: str
    probability: float | None


@dataclass(frozen=True, slots=True)
class LensLayer:
    """One layer's candidates, best first. `place` is where the token that was emitted stands among them, from 0
    (None: not among them); `golden` is what the reference's own row would have chosen."""

    tap: str
    name: str
    guesses: tuple[Guess, ...]
    entropy: float | None
    place: int | None
    golden: Guess | None


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


def lens(source: Source, where: Where) -> Lens:
    """The newest lens of the step at `where`."""
    steps = source.session.steps(where.branch)
    sequence = source.sequence(where.step, where.branch, where.seq) if where.step in steps else None
    emitted = sequence.emitted if sequence is not None else None
    shown = None if emitted is None else source.texts.label(emitted)
    data = _newest(source, where)
    rows, beside = data.get("layers"), data.get("golden")
    golden = beside if isinstance(beside, list) else []
    layers = [
        layer
        for i, row in enumerate(rows[:_LAYERS] if isinstance(rows, list) else [])
        if (layer := _layer(source, row, golden[i] if i < len(golden) else None, emitted)) is not None
    ]
    return Lens(where.step, shown, tuple(layers))


def _newest(source: Source, where: Where) -> Mapping[str, object]:
    if where.step not in source.session.steps(where.branch):
        return {}
    owner = source.session.owner(where.step, where.branch)
    for event in reversed(source.session.events(branch=owner, step=where.step, kind="lens")):
        if isinstance(event.data, dict) and event.data.get("seq") == where.seq:
            return event.data
    return {}


def _layer(source: Source, row: object, golden: object, emitted: int | None) -> LensLayer | None:
    guesses = _guesses(source, row)
    if not guesses or not isinstance(row, dict):
        return None
    tap = clean(str(row.get("tap")), limit=120)
    layer = layer_of(tap)
    tokens = [guess.token for guess in guesses]
    entropy = row.get("entropy")
    return LensLayer(
        tap,
        tap if layer is None else f"layer {layer}",
        guesses,
        float(entropy) if isinstance(entropy, int | float) else None,
        tokens.index(emitted) if emitted in tokens else None,
        next(iter(_guesses(source, golden)), None),
    )


def _guesses(source: Source, row: object) -> tuple[Guess, ...]:
    """The candidates of a row as the session has it; what is malformed is left out."""
    if not isinstance(row, dict):
        return ()
    ids, logits, total = row.get("ids"), row.get("logits"), row.get("logsumexp")
    if not isinstance(ids, list) or not isinstance(logits, list):
        return ()
    found = []
    for token, logit in list(zip(ids, logits, strict=False))[:_CANDIDATES]:
        if type(token) is int:
            known = isinstance(logit, int | float) and isinstance(total, int | float)
            chance = math.exp(min(0.0, logit - total)) if known else None
            found.append(Guess(token, source.texts.label(token), chance))
    return tuple(found)
