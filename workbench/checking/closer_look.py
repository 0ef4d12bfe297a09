"""Which tensors a second run of an engine is to keep, after one that kept statistics of everything."""

from __future__ import annotations

from dataclasses import dataclass

from lockstep.engine.taps.names import layer_of
from lockstep.workbench.checking.pipeline import CheckResult

#: Bytes of all tensors of a run up to which a match is one of tensors, not of statistics.
SMALL = 256 << 20


@dataclass(frozen=True, slots=True)
class CloserLook:
    """The `tensors` to keep, as globs; none: there is nothing to look at. They are of `layers`. `entering` is the tap
    that goes into the first of these: where it is wrong already, the place is before. `why` is what was found so far.
    """

    why: str
    tensors: tuple[str, ...] = ()
    entering: str = ""
    layers: range = range(0)

    @property
    def summary(self) -> str:
        """The tensors in words."""
        if self.tensors == ("*",):
            return "all taps"
        first, last = self.layers.start, self.layers.stop - 1
        layers = f"layer {first}" if first == last else f"layers {first} to {last}"
        return f"{layers}, what enters {'it' if first == last else 'them'}, and what follows the last layer"


def first_look(found: CheckResult, layers: int, size: int) -> CloserLook:
    """After a run that kept statistics of a model of `layers` layers, and the tensors at both its ends. `size`: bytes
    that all its tensors would take. A rotation by wrong angles leaves every statistic of a row as it is: where few
    bytes show more than statistics, a match does not rest on these.
    """
    event = found.event
    if event.coverage is not None and event.coverage.misplaced:
        return CloserLook(event.coverage.misplaced)
    if found.golden_session is None:
        return CloserLook("there is no reference to hold statistics against", ("*",))
    if found.moved is not None:
        return _around(found.moved.in_words(), found.moved.tap, layers)
    if event.verdict == "diverged":
        return CloserLook("the logits are wrong, and no statistics show from where on", ("*",))
    right = "the logits are right, and no row's statistics leave the reference"
    if found.event.verdict == "match" and size <= SMALL:
        return CloserLook(f"{right}; all tensors are small enough to be held against it as well", ("*",))
    return CloserLook(right)


def further_look(found: CheckResult, before: CloserLook) -> CloserLook:
    """After a run that kept the tensors of `before`: those of everything up to there, where the place is not in it."""
    first = found.event.first_divergence
    if first is None:
        reported = "nothing is wrong in it" if found.event.verdict == "match" else found.event.verdict
        return CloserLook(reported)
    if first.tap != before.entering:
        return CloserLook(f"first wrong: {first.in_words()}")
    layers = range(before.layers.stop)
    why = f"{first.tap}, which enters these layers, is wrong already, by what statistics do not show"
    return CloserLook(why, _kept(layers), "", layers)


def _around(why: str, tap: str, layers: int) -> CloserLook:
    """The tap's layer, the one before and the one after."""
    layer = layer_of(tap)
    at = layer if layer is not None else 0 if tap == "embed" else layers - 1
    window = range(max(0, at - 1), max(1, min(layers, at + 2)))
    entering = f"layers.{window.start - 1}.mlp_residual" if window.start else ""
    return CloserLook(why, (*_kept(window), *([entering] if entering else [])), entering, window)


def _kept(layers: range) -> tuple[str, ...]:
    return (*(f"layers.{layer}.*" for layer in layers), "final_norm")
