"""What is known of the taps that a tap is computed from: whether they have failed, and how far off they are."""

from __future__ import annotations

from dataclasses import dataclass, field

from lockstep.engine.taps.flow import inputs_of, is_known, remembers
from lockstep.workbench.diagnosis.judgement import TapVerdict


@dataclass(slots=True)
class Upstream:
    """The verdicts so far, taps being judged in the order of execution."""

    num_layers: int
    failed: set[tuple[int, str]] = field(
        default_factory=set
    )  # (sequence, tap) of this step, what inherits too
    cached: set[tuple[int, str]] = field(default_factory=set)  # failed cache taps of earlier steps
    ratios: dict[tuple[int, str], float] = field(default_factory=dict)  # of this step
    known: set[str] = field(default_factory=set)
    step: int = -1

    def enter(self, step: int) -> None:
        """The places of another step follow."""
        if step != self.step:
            self.cached |= {(seq, tap) for seq, tap in self.failed if remembers(tap)}
            self.failed, self.ratios, self.step = set(), {}, step

    def has_failed(self, seq: int, tap: str) -> bool:
        """Whether something that `tap` is computed from has failed."""
        return (seq, tap) in self.cached or any((seq, name) in self.failed for name in self._inputs(tap))

    def ratio(self, seq: int, tap: str) -> float:
        """The largest error of its inputs, over their floors."""
        return max((self.ratios.get((seq, name), 0.0) for name in self._inputs(tap)), default=0.0)

    def note(self, verdict: TapVerdict, inherited: bool) -> None:
        """Remember a tap's verdict. A tap without a counterpart hands on what it was given."""
        if inherited or verdict.verdict == "fail":
            self.failed.add((verdict.seq, verdict.tap))
        self.known.add(verdict.tap)
        known = verdict.verdict != "absent"
        self.ratios[verdict.seq, verdict.tap] = (
            verdict.ratio if known else self.ratio(verdict.seq, verdict.tap)
        )

    def _inputs(self, tap: str) -> tuple[str, ...]:
        return inputs_of(tap, self.num_layers, self.known) if is_known(tap) else ()
