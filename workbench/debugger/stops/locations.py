"""Locations: what `break`, `until`, `goto` and `print` are given, as places (indices of taps in execution order).

layers.3.attn.q_proj     one tap              layers.3        a layer: its first tap
layers.3.attn.*          a glob of taps       attn.q_proj     that tap in every layer
logits                                        12              a step
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase

from lockstep.engine.taps.names import layer_of, layer_path
from lockstep.engine.text import did_you_mean
from lockstep.sessions.meta import is_companion
from lockstep.sessions.text import clean
from lockstep.workbench.debugger.answers import Position
from lockstep.workbench.debugger.errors import CommandError
from lockstep.workbench.debugger.stops.beginnings import DataFlow


class Places:
    """The taps of one model, by name and by place."""

    def __init__(self, names: Sequence[str], absent: Mapping[str, str] | None = None) -> None:
        self.names, self._absent = tuple(names), absent or {}  # why a recorder could not have a tap
        #: Of each place the number of its layer, None outside the layers.
        self.layers = tuple(layer_of(name) for name in self.names)
        self.flow = DataFlow(self.names)
        #: The places of the model's operations: where one can stand.
        self.operations = tuple(place for place, name in enumerate(self.names) if not is_companion(name))
        self._index = {name: place for place, name in enumerate(self.names)}

    def __len__(self) -> int:
        return len(self.names)

    def name(self, place: int | None) -> str:
        """The tap at a place; "" for none."""
        return "" if place is None else self.names[place]

    def describe(self, at: Position) -> str:
        """ "branch 0, step 3, layers.0.attn.scores"."""
        tap = "" if at.place is None else f", {self.names[at.place]}"
        return f"branch {at.branch}, step {at.step}{tap}"

    def exact(self, name: str) -> int:
        """The place of a tap. CommandError suggests what may have been meant."""
        if name in self._index:
            return self._index[name]
        if why := self._absent.get(name):
            raise CommandError(f"{clean(name, limit=60)} was not recorded: {clean(why, limit=200)}")
        advice = did_you_mean(name, self.names, "`info taps` lists them")
        raise CommandError(f"there is no tap {clean(name, limit=60)!r}: {advice}")

    def matching(self, location: str) -> list[int]:
        """All places that a location or glob names, in execution order; CommandError for none."""
        if location in self._index:
            return [self._index[location]]
        for pattern in (location, f"layers.*.{location}"):
            found = [place for place in self.operations if fnmatchcase(self.names[place], pattern)]
            if found:
                return found
        layer = [place for place in self.operations if self.names[place].startswith(f"{location}.")]
        return layer[:1] if layer else [self.exact(location)]

    def following(self, place: int) -> int | None:
        """The operation after a place (-1: the first); None after the last."""
        return next((one for one in self.operations if one > place), None)

    def preceding(self, place: int | None) -> int | None:
        """The operation before a place (None: the last); None before the first."""
        return next((one for one in reversed(self.operations) if place is None or one < place), None)

    def layer_start(self, place: int) -> int:
        """The first place of the layer of `place`."""
        layer = layer_path(self.names[place])
        while place > 0 and layer_path(self.names[place - 1]) == layer:
            place -= 1
        return place

    def layer_end(self, place: int) -> int:
        """The last place of the layer of `place`."""
        layer = layer_path(self.names[place])
        while (after := self.following(place)) is not None and layer_path(self.names[after]) == layer:
            place = after
        return place
