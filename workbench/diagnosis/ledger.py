"""The error ledger: which operations are wrong by themselves, whatever came before them (DESIGN §3).

A run shows where the error begins; what follows is wrong because its inputs are, and may be wrong by itself as well.
So the run is made once more under corrections: every tap gets its golden value once it was recorded. There each
operation has worked on right inputs, and its error is the *injected* one. A tap that failed in the plain run and
passes here has only inherited.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Literal

from lockstep.engine.taps.names import count_layers, layer_of, local_name
from lockstep.workbench.diagnosis.flips import is_choice
from lockstep.workbench.diagnosis.judgement import Judgement, TapVerdict
from lockstep.workbench.diagnosis.measure import Recordings, limits_of, measure
from lockstep.workbench.diagnosis.upstream import Upstream
from lockstep.workbench.diagnosis.verdict import verdict_of
from lockstep.workbench.judgements.golden_event import Faulty

#: How many groups of operations are named; the rest is counted.
_NAMED = 6


def ledger(plain: Judgement, corrected: Recordings) -> Judgement:
    """`plain` with the injected error of every tap, and with `faulty`. `corrected` has the same run under
    corrections."""
    measured = list(measure(corrected))
    limits = limits_of(corrected.engine.dtype, measured)
    upstream = Upstream(count_layers(place.tap for place in measured))
    taps = []
    for reported, place in zip(plain.taps, measured, strict=True):
        assert (reported.tap, reported.step, reported.seq) == (place.tap, place.step, place.seq), (
            "two different runs"
        )
        upstream.enter(place.step)
        spoilt = upstream.has_failed(place.seq, place.tap)
        own = verdict_of(place, limits)
        found = place.engine.metrics
        if found is None or not found.size:  # not replaced: of another shape, or without a golden tensor
            upstream.note(own, spoilt)
        taps.append(_entry(reported, own, spoilt))
    faulty = tuple(_faulty(taps))
    judged = replace(plain, taps=tuple(taps), faulty=faulty)
    if plain.tolerance == "fixed" and not faulty and all(miss.tie for miss in plain.mismatches):
        # A fixed tolerance does not grow with depth, as noise does.
        verdict: Literal["match", "inconclusive"] = "inconclusive" if plain.overflow else "match"
        notes = (*plain.notes, f"beyond the fixed tolerance, but {in_words(judged)}")
        judged = replace(judged, verdict=verdict, first_divergence=None, notes=notes)
    return judged


def _entry(plain: TapVerdict, own: TapVerdict, spoilt: bool) -> TapVerdict:
    """The plain verdict with the injected error beside it. `spoilt`: an input could not be replaced."""
    if own.verdict == "absent":
        return plain
    # Golden scores, rounded, may choose otherwise: whether a choice is right is seen on its own inputs.
    right = own.verdict != "fail" or spoilt or is_choice(own.tap)
    failed = plain.verdict == "fail"
    entry = replace(plain, injected=own.rel_l2, injected_ratio=own.ratio, inherited=right and failed)
    if right or failed:
        return entry
    # What came before it has made up for the error.
    return replace(entry, verdict="fail", reason=f"{own.reason}, on the golden inputs")


def _faulty(taps: Sequence[TapVerdict]) -> Iterable[Faulty]:
    """Each operation that errs by itself, where it does so first."""
    seen: set[str] = set()
    for one in taps:
        if one.verdict == "fail" and not one.inherited and one.tap not in seen:
            seen.add(one.tap)
            yield Faulty(one.tap, one.step, one.seq, one.injected, one.injected_ratio)


def in_words(judgement: Judgement) -> str:
    """ "9 operations are wrong by themselves: layers.*.attn.q_proj, …"; "" where nobody asked."""
    faulty = judgement.faulty
    if faulty is None:
        return ""
    if not faulty:
        return "no operation is wrong by itself: noise has grown on its way"
    everywhere = set(range(count_layers(one.tap for one in judgement.taps)))
    groups: dict[tuple[str, int], set[int]] = {}
    for one in faulty:
        layer = layer_of(one.tap)
        groups.setdefault((local_name(one.tap), one.step), set()).update(() if layer is None else {layer})
    names = [_name(kind, step, layers, everywhere) for (kind, step), layers in groups.items()]
    if len(names) > _NAMED:
        names[_NAMED:] = [f"and {len(names) - _NAMED} more"]
    many = "operation is wrong by itself" if len(faulty) == 1 else "operations are wrong by themselves"
    return f"{len(faulty)} {many}: {', '.join(names)}"


def _name(kind: str, step: int, layers: set[int], everywhere: set[int]) -> str:
    """ "layers.*.attn.q_proj", "layers.{0,2}.mlp.act from step 1", "logits"."""
    some = str(min(layers)) if len(layers) == 1 else f"{{{','.join(map(str, sorted(layers)))}}}"
    where = f"layers.{'*' if layers == everywhere else some}." if layers else ""
    return f"{where}{kind}{f' from step {step}' if step else ''}"
