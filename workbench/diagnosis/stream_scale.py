"""A residual stream that is kept at another size throughout, which every norm divides out again.

Engines do so against overflow in half precision: the embedding and all that is added to the stream are scaled by one
factor (some halve all of it every few layers), and each epsilon by its square. Operation by operation all writers are
wrong then, though nothing is. So the stream and what is added to it are divided by that factor, and judged again.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass

from lockstep.engine.taps.flow import near
from lockstep.engine.taps.names import local_name
from lockstep.workbench.diagnosis.hypotheses.fits import factor_of, named, resolution, simple
from lockstep.workbench.diagnosis.operations.facts import Facts
from lockstep.workbench.diagnosis.operations.recorded import RecordedTaps
from lockstep.workbench.diagnosis.operations.site import Site
from lockstep.workbench.diagnosis.operations.sites import sites_of

#: What is added to the stream, by the kind of tap at which the sum stands.
_ADDED = {
    "attn_residual": ("attn.o_proj.partial", "attn.o_proj"),
    "mlp_residual": ("mlp.down.partial", "mlp.down"),
}

#: No engine keeps its stream at a size farther from the right one; nor is nothing at all a size.
_FARTHEST = 2.0**64


@dataclass(frozen=True, slots=True)
class RestoredStream:
    """The recording with its stream as the checkpoint has it, and what the engine does to it throughout. `right`:
    taps of the stream that are right so."""

    taps: RecordedTaps
    right: tuple[str, ...]
    text: str


def scaled_stream(taps: RecordedTaps, facts: Facts, wrong: Collection[str]) -> RestoredStream | None:
    """The recording's stream at its right size, if what writes to it shares a factor that it should not have: what
    does not is wrong at the right size, as an epsilon is that was left as it was. `wrong` are the taps of operations
    that err."""
    factors = {tap: value for tap, value in _factors(taps, facts, wrong).items() if value != 1}
    if not factors or not all(1 / _FARTHEST <= value <= _FARTHEST for value in factors.values()):
        return None
    scaled = taps.scaled({tap: 1 / value for tap, value in factors.items()})
    before, after = erring(factors, taps, facts), erring(factors, scaled, facts)
    writers = {kind for kinds in _ADDED.values() for kind in kinds}
    if 2 * len(after) >= len(before) or not any(local_name(tap) in writers for tap in before - after):
        return None
    right = tuple(tap for tap in factors if tap not in after)
    sizes = tuple(dict.fromkeys(factors[tap] for tap in right))
    words = " and ".join(f"{named(one)} times" for one in sizes[:4])
    return RestoredStream(
        scaled,
        right,
        f"the whole residual stream is {words} what it should be; every norm divides that out again",
    )


def _factors(taps: RecordedTaps, facts: Facts, wrong: Collection[str]) -> dict[str, float]:
    """By how much the stream, and what is added to it, is larger than it should be: there and from there on."""
    found = {"embed": _own_factor("embed", taps, facts) if "embed" in wrong else 1.0}
    for layer in range(facts.model.num_layers):
        for kind, added in _ADDED.items():
            entered = near("<", layer, 0) if kind == "attn_residual" else f"layers.{layer}.attn_residual"
            size, tap = found[entered], f"layers.{layer}.{kind}"
            found |= {near(one, layer, 0): size for one in added if taps.captured(near(one, layer, 0))}
            found[tap] = size * (_own_factor(tap, taps, facts) if tap in wrong else 1.0)
    return {tap: value for tap, value in found.items() if taps.captured(tap)}


def _own_factor(tap: str, taps: RecordedTaps, facts: Facts) -> float:
    """The number by which an operation alone is too large; 1 where it is right, or wrong in another way."""
    for site in _judged(tap, taps, facts) if taps.captured(tap) else ():
        if site.deviation is not None and site.parts[0].fits:
            value = factor_of(site.expected, site.seen)
            return simple(value, within=resolution(site)) if value > 0 else 1.0
    return 1.0


def erring(names: Collection[str], taps: RecordedTaps, facts: Facts) -> set[str]:
    """Those of these taps at which an operation is wrong on its own inputs."""
    return {tap for tap in names if any(site.deviation for site in _judged(tap, taps, facts))}


def _judged(tap: str, taps: RecordedTaps, facts: Facts) -> Iterator[Site]:
    return (one for one in sites_of(tap, taps, facts) if isinstance(one, Site))
