"""Numbers that leave the range of the engine's dtype where those of the reference do as well: the dtype does not carry
the model, and the engine has nothing wrong."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from lockstep.workbench.diagnosis.findings import WrongOperation
from lockstep.workbench.diagnosis.merging import FindingGroup
from lockstep.workbench.diagnosis.recording import Recording


def beyond_range(groups: Sequence[FindingGroup], floor: Recording, truth: Recording) -> Iterator[int]:
    """The places in `groups` of the overflows that `floor`, the reference at the engine's dtype, has too: at the same
    taps, where `truth` is finite."""
    for number, group in enumerate(groups):
        if (
            group.chosen
            and all(one.kind == "overflow" for one in group.chosen)
            and all(_overflows(one, floor, truth) for one in group.findings)
        ):
            yield number


def _overflows(finding: WrongOperation, floor: Recording, truth: Recording) -> bool:
    tap = finding.tap.removesuffix(".partial")  # the reference has no ranks
    for step in finding.steps:
        for seq in finding.seqs:
            near, right = (side.whole_or_none(tap, step, seq) for side in (floor, truth))
            if near is None or right is None or near.shape != right.shape:
                continue
            if bool((~np.isfinite(near) & np.isfinite(right)).any()):
                return True
    return False
