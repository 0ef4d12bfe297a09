"""Causes as the user reads them, made of findings that one hypothesis explains, or that none does."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from msgspec.structs import replace

from lockstep.engine.taps.names import count_layers, layer_of, local_name
from lockstep.workbench.diagnosis.confidence import confidences
from lockstep.workbench.diagnosis.findings import Hypothesis, Survey, WrongOperation
from lockstep.workbench.diagnosis.hypotheses.words import sentence_of
from lockstep.workbench.diagnosis.merging import FindingGroup
from lockstep.workbench.diagnosis.operations.recorded import RecordedTaps, SequencePass
from lockstep.workbench.judgements.cause import UNNAMED, Cause, numbers_in_words
from lockstep.workbench.judgements.golden_event import plain
from lockstep.workbench.judgements.known_faults import fault_of

#: Hypotheses that are named among those that were ruled out.
_MOST_RULED_OUT = 12
#: Kinds of taps of one layer that are reported one by one: more are nearly all that compute something by themselves.
_MOST_KINDS = 6
#: A projection in a sentence.
_MODULE = re.compile(r"\b[qkv]_proj\b")


@dataclass(frozen=True, slots=True)
class Extent:
    """All that was recorded, against which a place is reported."""

    layers: int
    ranks: int
    steps: tuple[int, ...]
    decode: frozenset[int]  # those in which no sequence reads more than a token
    seqs: tuple[int, ...]
    passes: tuple[SequencePass, ...] = ()

    @classmethod
    def of(cls, taps: RecordedTaps) -> Extent:
        return cls(
            count_layers(tap.name for tap in taps.recording.session.taps),
            len(taps.ranks),
            tuple(sorted({one.step for one in taps.passes})),
            frozenset(one.step for one in taps.passes) - _prefill(taps.passes),
            tuple(sorted({one.seq for one in taps.passes})),
            taps.passes,
        )

    def rest_of(self, finding: WrongOperation) -> set[int]:
        """The positions of tokens that are right in the passes in which an operation is wrong."""
        inside = (one for one in self.passes if one.step in finding.steps and one.seq in finding.seqs)
        return {row.position for one in inside for row in one.rows} - set(finding.positions)


def _prefill(passes: Iterable[SequencePass]) -> set[int]:
    """The first step, and those in which a sequence reads a chunk of its prompt."""
    found = list(passes)
    return {min((one.step for one in found), default=0)} | {one.step for one in found if len(one.rows) > 1}


def causes_of(
    group: FindingGroup, seen: Survey, extent: Extent, after: Sequence[FindingGroup] = ()
) -> list[Cause]:
    """The cause of a group of findings, with what follows from it (`after`), and those that explain it as well."""
    follows = tuple(_consequence(one, extent) for one in after)
    if not group.chosen:
        return [replace(_unnamed(group, seen, extent), follows=follows)]
    first = group.chosen[group.findings.index(group.first)]
    sure, *shares = confidences(group)
    found = [replace(_cause(group, first, seen, extent, sure, alternative=False), follows=follows)]
    return found + [
        _cause(group, one, seen, extent, share, alternative=True)
        for one, share in zip(group.others, shares, strict=True)
    ]


def _consequence(group: FindingGroup, extent: Extent) -> str:
    if not group.chosen:
        return f"{place_of(group.findings, extent)}: {group.first.shape or f'off by {_size(group.first)}'}"
    chosen = group.chosen[group.findings.index(group.first)]
    return f"{place_of(group.findings, extent)}: {_sentence(group, chosen)}"


def _cause(
    group: FindingGroup, one: Hypothesis, seen: Survey, extent: Extent, sure: float, *, alternative: bool
) -> Cause:
    finding = group.first
    fitted = plain(dict(one.fitted))
    return _placed(
        Cause(
            name=one.name,
            text=_sentence(group, one),
            transform=fitted,
            residual=one.residual,
            kind=one.kind,
            fault=fault_of(one.name, fitted, {local_name(each.tap) for each in group.findings}),
            confidence=round(sure, 4),
            evidence=tuple(_evidence(group, one, seen)),
            ruled_out=tuple(_ruled_out(finding, {one.name, *(other.name for other in group.others)})),
            alternative=alternative,
        ),
        group.findings,
        extent,
    )


def _unnamed(group: FindingGroup, seen: Survey, extent: Extent) -> Cause:
    finding = group.first
    wrong = f"has {finding.shape}" if finding.shape else f"is off by {_size(finding)},"
    text = f"{finding.operation} {wrong} given its own inputs and the checkpoint, and no known cause fits"
    evidence = [finding.example] if finding.example else []
    partly = [one for one in finding.hypotheses if not one.accepted and one.residual < 0.5]
    evidence += [f"a part of it ({100 * (1 - one.residual):.0f} %): {one.text}" for one in partly[:2]]
    return _placed(
        Cause(
            name="unnamed",
            text=text,
            kind=UNNAMED,
            evidence=(*evidence, _count(group, seen)),
            ruled_out=tuple(_ruled_out(finding, set())),
        ),
        group.findings,
        extent,
    )


def _size(finding: WrongOperation) -> str:
    if not math.isfinite(finding.rel_l2):
        return "what is not finite"
    return f"{finding.rel_l2:.2g} (relative L2), {finding.ratio:.3g} times its rounding"


def _evidence(group: FindingGroup, one: Hypothesis, seen: Survey) -> list[str]:
    finding = group.first
    noise = f"{finding.ratio:.3g} times" if math.isfinite(finding.ratio) else "infinitely more than"
    reported = [
        f"given its own inputs the error is {noise} what rounding does, of which this leaves {one.ratio:.2g}"
    ]
    if one.parameters:
        reported.append(f"{one.parameters} fitted, {one.elements} numbers reproduced")
    reported.append(_count(group, seen))
    if one.everywhere:
        reported.append("it gives the recorded numbers everywhere, where the operation is right as well")
    if finding.example:
        reported.append(finding.example)
    return reported


def _count(group: FindingGroup, seen: Survey) -> str:
    kinds = {local_name(one.tap) for one in group.findings}
    judged = sum(many for tap, many in seen.judged.items() if local_name(tap) in kinds)
    wrong = sum(len(one.ranks) for one in group.findings)
    return f"at {wrong} of {judged} places that were judged (layers × ranks)"


def _ruled_out(finding: WrongOperation, named: set[str]) -> list[str]:
    """What was tried and does not fit, those that explain something with what they leave."""
    left = {
        one.name: f"{one.name} (leaves {100 * one.residual:.2g} %)"
        for one in finding.hypotheses
        if not one.accepted
    }
    others = [left.get(name, name) for name in finding.tried if name not in named]
    others.sort(key=lambda words: "leaves" not in words)
    more = len(others) - _MOST_RULED_OUT
    return others[:_MOST_RULED_OUT] + ([f"{more} more"] if more > 0 else [])


# --- where ---------------------------------------------------------------------------------------------------


def _placed(cause: Cause, findings: Sequence[WrongOperation], extent: Extent) -> Cause:
    first = min(findings, key=lambda one: (min(one.steps, default=0), one.order))
    heads = {head for one in findings for head in one.heads}
    if any(not one.heads for one in findings):
        heads = set()
    return replace(
        cause,
        tap=first.tap,
        place=place_of(findings, extent),
        layers=tuple(sorted({one.layer for one in findings if one.layer is not None})),
        ranks=tuple(sorted({rank for one in findings for rank in one.ranks})),
        heads=tuple(sorted(heads)),
        steps=tuple(sorted({step for one in findings for step in one.steps})),
    )


def place_of(findings: Sequence[WrongOperation], extent: Extent) -> str:
    """ "layers.*.attn.{q,k,v}_proj, rank 1, decode steps"."""
    parts = [taps_in_words([one.tap for one in findings], extent.layers)]
    ranks = {rank for one in findings for rank in one.ranks}
    if len(ranks) < extent.ranks:
        parts.append(f"rank{'s' * (len(ranks) > 1)} {numbers_in_words(sorted(ranks))} of {extent.ranks}")
    heads = {head for one in findings for head in one.heads}
    if heads and all(one.heads for one in findings):
        parts.append(f"head{'s' * (len(heads) > 1)} {numbers_in_words(sorted(heads))}")
    steps = {step for one in findings for step in one.steps}
    if steps and len(steps) < len(extent.steps):
        prefill = set(extent.steps) - extent.decode
        words = "the prefill" if steps == prefill else "decode" if steps == extent.decode else ""
        parts.append(words or f"step{'s' * (len(steps) > 1)} {numbers_in_words(sorted(steps))}")
    if positions := _positions(findings, extent):
        parts.append(positions)
    seqs = {seq for one in findings for seq in one.seqs}
    if seqs and len(seqs) < len(extent.seqs):
        parts.append(f"sequence{'s' * (len(seqs) > 1)} {numbers_in_words(sorted(seqs))}")
    return ", ".join(parts)


def _positions(findings: Sequence[WrongOperation], extent: Extent) -> str:
    """The only wrong tokens of the passes, or rows of a cache, where they are the same everywhere; "" of logits, of
    which a prompt has one row, and where one token alone is right: the first is not rotated, and the last of a prompt
    has no later one to see. Of rows that decode steps alone show it is the steps that are reported."""
    found = {one.positions for one in findings}
    if (
        len(found) > 1
        or all(one.every_row for one in findings)
        or any(len(extent.rest_of(one)) < 2 for one in findings)
    ):
        return ""
    cached = [one.operation == "cache" for one in findings]
    if any(cached) and not (all(cached) and all(extent.steps[0] in one.steps for one in findings)):
        return ""
    (positions,) = found
    return f"{'row' if all(cached) else 'position'}{'s' * (len(positions) > 1)} {numbers_in_words(positions)}"


def taps_in_words(taps: Sequence[str], layers: int) -> str:
    """Taps of one family drawn together: "layers.*.attn.{q,k,v}_proj", "layers.{0,2}.mlp.act", "logits"; whole layers
    as "layers.1.*"."""
    kinds: dict[str, set[int]] = {}
    for tap in taps:
        layer = layer_of(tap)
        kinds.setdefault(local_name(tap), set()).update(() if layer is None else {layer})
    reported: dict[tuple[int, ...], list[str]] = {}
    for kind, numbers in kinds.items():
        reported.setdefault(tuple(sorted(numbers)), []).append(kind)
    return ", ".join(
        _layers(numbers, layers) + ("*" if numbers and len(names) > _MOST_KINDS else _joined(names))
        for numbers, names in reported.items()
    )


def _layers(numbers: tuple[int, ...], layers: int) -> str:
    if not numbers:
        return ""
    if len(numbers) == 1:
        return f"layers.{numbers[0]}."
    words = "*" if len(numbers) == layers else f"{{{numbers_in_words(numbers).replace(', ', ',')}}}"
    return f"layers.{words}."


def _joined(kinds: Sequence[str]) -> str:
    """ "attn.q_proj", "attn.k_proj" -> "attn.{q,k}_proj"."""
    if len(kinds) == 1:
        return kinds[0]
    head, tail = (
        kinds[0].rsplit(".", 1)[0] if "." in kinds[0] else "",
        re.sub(r"^.*?([_.][a-z]+)?$", r"\1", kinds[0]),
    )
    prefix = f"{head}." if head and all(kind.startswith(f"{head}.") for kind in kinds) else ""
    suffix = tail if tail and all(kind.endswith(tail) for kind in kinds) else ""
    middles = [kind[len(prefix) : len(kind) - len(suffix) or None] for kind in kinds]
    return f"{prefix}{{{','.join(middles)}}}{suffix}"


def _sentence(group: FindingGroup, one: Hypothesis) -> str:
    """What it is at all findings."""
    if one in group.chosen:
        places = [(chosen.setting, chosen.edits) for chosen in group.chosen if chosen.setting is not None]
        if len(places) == len(group.chosen):
            return sentence_of(places)
    return _text(one.text, group.findings)


def _text(text: str, findings: Sequence[WrongOperation]) -> str:
    """The sentence about one finding, stated for all."""
    layers = {one.layer for one in findings}
    if len(layers) > 1:
        text = re.sub(r"layers\.\d+\.", "layers.*.", text)
    modules = [local_name(one.tap).rsplit(".", 1)[-1] for one in findings]
    kinds = list(dict.fromkeys(name for name in modules if name.endswith("_proj")))
    if len(kinds) > 1 and all(kind in ("q_proj", "k_proj", "v_proj") for kind in kinds):
        joined = f"{{{','.join(kind[0] for kind in kinds)}}}_proj"
        text = _MODULE.sub(joined, text)
    return text
