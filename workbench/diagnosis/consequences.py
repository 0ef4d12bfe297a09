"""Findings that follow from another one: reported with their cause, not beside it.

Each operation is judged on its own inputs, so that little follows. But a tensor of another shape leaves the next
operation no other choice, positions that the engine itself has wrong are used by its cache and its mask as well, and a
norm that writes into its input leaves no input to be judged on.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

from lockstep.engine.taps.flow import inputs_of, remembers
from lockstep.engine.taps.names import local_name
from lockstep.workbench.diagnosis.findings import WrongOperation
from lockstep.workbench.diagnosis.hypotheses.edits import Edit
from lockstep.workbench.diagnosis.hypotheses.operands import READER
from lockstep.workbench.diagnosis.merging import FindingGroup

#: A norm whose input goes on as it is; a residual sum in whose place the output of its reader goes on.
_SKIPPED, _OVERWRITTEN = Edit((), "skipped", ("x",)), Edit((), "operand", (READER,))
#: Where a mask shows: in the scores, or in the context of a fused attention.
_MASKED = ("attn.scores", "attn.context")


def folded(
    groups: Sequence[FindingGroup], judged: Collection[str] = (), layers: int = 0
) -> list[tuple[FindingGroup, tuple[FindingGroup, ...]]]:
    """The groups that stand by themselves, in their order, each with those that follow from it. `judged`: the taps that
    could be; `layers`: how many the model has."""
    misshapen = _misshapen(groups)
    heads: list[FindingGroup] = []
    after: dict[int, list[FindingGroup]] = {}  # by the place in `heads`
    for group in groups:
        of = next(
            (
                i
                for i, head in enumerate(heads)
                if _follows(group, [head, *after[i]], misshapen)
                or _by_the_same_shape(group, head)
                or _by_position(group, head)
                or _by_length(group, head)
                or _by_overwriting(group, head, layers)
                or _by_what_is_everywhere(group, head, judged)
            ),
            None,
        )
        if of is None:
            after[len(heads)] = []
            heads.append(group)
        else:
            after[of].append(group)
    return [(head, tuple(after[i])) for i, head in enumerate(heads)]


def misshapen_by_input(groups: Sequence[FindingGroup]) -> frozenset[str]:
    """The taps that have another shape only because an input has."""
    misshapen, findings = _misshapen(groups), [one for group in groups for one in group.findings]
    return frozenset(one.tap for one in findings if _has_such_input(one, misshapen)) - {
        one.tap for one in findings if not _has_such_input(one, misshapen)
    }


def _misshapen(groups: Iterable[FindingGroup]) -> dict[str, set[int]]:
    """The steps at which taps have another shape than they should."""
    return {one.tap: set(one.steps) for group in groups for one in group.findings if one.shape}


def _follows(group: FindingGroup, before: Sequence[FindingGroup], misshapen: Mapping[str, set[int]]) -> bool:
    """Whether all of it has another shape because an input has, some of those among `before`: one cause may have been
    named in a part of the layers alone."""
    mine = _misshapen(before)
    return all(_has_such_input(one, misshapen) for one in group.findings) and any(
        _has_such_input(one, mine) for one in group.findings
    )


def _by_the_same_shape(group: FindingGroup, head: FindingGroup) -> bool:
    """Whether nothing is known of it but that it has the shape that the cause gives to the same operation in other
    layers: its input is not finite."""
    shapes = {(local_name(one.tap), one.shape) for one in head.findings if one.shape}
    return (
        bool(head.chosen)
        and not group.chosen
        and all((local_name(one.tap), one.shape) in shapes for one in group.findings)
    )


def _has_such_input(finding: WrongOperation, misshapen: Mapping[str, set[int]]) -> bool:
    steps = [misshapen[tap] for tap in inputs_of(finding.tap) if tap in misshapen]
    return bool(finding.shape) and any(set(finding.steps) <= some for some in steps)


def _by_length(group: FindingGroup, head: FindingGroup) -> bool:
    """Whether it is a mask over a cache of another length: it has rows to hide, or lacks some, that should not be."""
    if not group.chosen or not all(one.kind == "mask" for one in group.chosen):
        return False
    places = {(one.layer, step) for one in head.findings if one.shape and remembers(one.tap)
              for step in one.steps}  # fmt: skip
    return all({(one.layer, step) for step in one.steps} <= places for one in group.findings)


def _by_position(group: FindingGroup, head: FindingGroup) -> bool:
    """Whether it is a cache of another length, or a mask, where the engine's own positions are wrong."""
    if (
        not all(one.kind == "positions" and one.fitted.get("recorded") for one in head.chosen)
        or not head.chosen
    ):
        return False
    places = {(one.layer, step) for one in head.findings for step in one.steps}
    masks = bool(group.chosen) and all(one.kind == "mask" for one in group.chosen)
    return all(
        {(one.layer, step) for step in one.steps} <= places
        and ((masks and local_name(one.tap) in _MASKED) or (one.shape and remembers(one.tap)))
        for one in group.findings
    )


def _by_overwriting(group: FindingGroup, head: FindingGroup, layers: int) -> bool:
    """Whether it is a norm that seems to be skipped because what it reads is its own output, which went on in place of
    the sum."""
    if not group.chosen or not all(one.edits == (_SKIPPED,) for one in group.chosen):
        return False
    over = {
        finding.tap: set(finding.steps)
        for finding, one in zip(head.findings, head.chosen, strict=bool(head.chosen))
        if one.edits == (_OVERWRITTEN,)
    }
    return all(
        any(set(one.steps) <= over.get(tap, set()) for tap in inputs_of(one.tap, layers))
        for one in group.findings
    )


def _by_what_is_everywhere(group: FindingGroup, head: FindingGroup, judged: Iterable[str]) -> bool:
    """Whether it is layers of whose inside nothing was recorded, and the cause is in all others: it is in these too, as
    far as is known."""
    if group.chosen or not head.chosen or any(one.operation != "layer" for one in group.findings):
        return False
    kinds = {local_name(one.tap) for one in head.findings}
    reported = {one.tap for one in (*head.findings, *group.findings)}
    return all(tap in reported for tap in judged if local_name(tap) in kinds)
