"""Locations: what `break`, `until`, `goto` and `print` are told, as places (indices of taps in execution order).

layers.3.attn.q_proj     one tap              layers.3        a layer: its first tap
layers.3.attn.*          a glob of taps       attn.q_proj     that tap in every layer
logits                                        12              a step
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from fnmatch import fnmatchcase

from lockstep.engine.taps.names import layer_of, layer_path
from lockstep.sessions.text import clean
from lockstep.workbench.debugger.answers import Position
from lockstep.workbench.debugger.errors import CommandError
from lockstep.workbench.debugger.stops.beginnings import DataFlow


class Places:
    """The taps of one model, by name and by place."""

    def __init__(self, names: Sequence[str]) -> None:
        self.names = tuple(names)
        #: Of each place the number of its layer, None outside the layers.
        self.layers = tuple(layer_of(name) for name in self.names)
        self.flow = DataFlow(self.names)
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
        close = difflib.get_close_matches(name, self.names, n=3, cutoff=0.6)
        advice = f"did you mean {' or '.join(close)}?" if close else "`info taps` lists them"
        raise CommandError(f"there is no tap {clean(name, limit=60)!r}: {advice}")

    def matching(self, location: str) -> list[int]:
        """All places that a location or glob names, in execution order; CommandError for none."""
        if location in self._index:
            return [self._index[location]]
        for pattern in (location, f"layers.*.{location}"):
            found = [place for place, name in enumerate(self.names) if fnmatchcase(name, pattern)]
            if found:
                return found
        layer = [place for place, name in enumerate(self.names) if name.startswith(f"{location}.")]
        return layer[:1] if layer else [self.exact(location)]

    def layer_start(self, place: int) -> int:
        """The first place of the layer of `place`."""
        layer = layer_path(self.names[place])
        while place > 0 and layer_path(self.names[place - 1]) == layer:
            place -= 1
        return place

    def layer_end(self, place: int) -> int:
        """The last place of the layer of `place`."""
        layer = layer_path(self.names[place])
        while place + 1 < len(self.names) and layer_path(self.names[place + 1]) == layer:
            place += 1
        return place
