"""Whether single operations are right on the inputs that the recording itself holds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from lockstep.engine.taps.flow import is_known
from lockstep.workbench.diagnosis.operations.facts import Facts
from lockstep.workbench.diagnosis.operations.recorded import RecordedTaps
from lockstep.workbench.diagnosis.operations.site import Unjudged
from lockstep.workbench.diagnosis.operations.sites import sites_of

#: (step, sequence)
_Place = tuple[int, int]


@dataclass(frozen=True, slots=True)
class OwnInputs:
    """The operations of one recording, each looked at when it is asked for."""

    taps: RecordedTaps
    facts: Facts
    _known: dict[str, Mapping[_Place, bool]] = field(default_factory=dict)

    def is_right(self, tap: str, step: int, seq: int) -> bool | None:
        """Whether it is, within rounding, on all ranks; None where it cannot be judged."""
        if tap not in self._known:
            self._known[tap] = self._judged(tap) if is_known(tap) else {}
        return self._known[tap].get((step, seq))

    def _judged(self, tap: str) -> dict[_Place, bool]:
        """Whether it is right in each pass that can be judged on all ranks."""
        by_site: list[dict[_Place, bool]] = []
        for site in sites_of(tap, self.taps, self.facts):
            if isinstance(site, Unjudged):
                return {}
            wrong = site.wrong_passes
            places = ((one.step, one.seq) for one in map(self.taps.passes.__getitem__, site.passes))
            by_site.append({place: place not in wrong for place in places})
        everywhere = set.intersection(*map(set, by_site)) if by_site else set()
        return {place: all(judged[place] for judged in by_site) for place in everywhere}
