"""What a motion runs to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from lockstep.workbench.debugger.stops.breakpoints import Breakpoint, Breakpoints
from lockstep.workbench.debugger.stops.locations import Places


@dataclass(frozen=True, slots=True)
class Goal:
    """Where to stop if nothing else does: at the next operation or layer, at a place, after step `last`."""

    stop: Literal["operation", "layer", "place", "never"] = "never"
    place: int = -1
    last: int | None = None
    quiet: bool = False  # neither breakpoints nor sentinels stop it (`goto`)
    catching: bool = True  # sentinels stop it
    reason: str = "step"

    def stoppers(self, breakpoints: Breakpoints) -> list[Breakpoint]:
        """The breakpoints that look at taps and stop it."""
        if self.quiet:
            return []
        return [one for one in breakpoints.at_taps() if self.catching or one.kind != "catch"]

    def place_in(self, places: Places, after: int) -> int | None:
        """The place at which it stops in a pass that stands behind place `after` (-1: at its beginning)."""
        if self.stop == "operation":
            return places.following(after)
        if self.stop == "layer":
            return places.following(after if after < 0 else places.layer_end(after))
        if self.stop == "place" and self.place > after:
            return self.place
        return None
