"""A rank program that gets into trouble when asked to: `python -m tests.engine.troubled_rank SPEC`.

Rules: `trouble` = sleep | raise | refuse | slow | spin | skip, on rank `rank`, in step `step`, at the first
row-parallel reduction (`slow`: a little at each of them; `spin`: computes for a while; `skip`: takes part in none).
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace

from torch import Tensor

from lockstep.engine.errors import RequestError
from lockstep.engine.parallel.comm import Comm
from lockstep.engine.ranks.worker import serve
from lockstep.engine.rules import CORRECT, Rules
from lockstep.engine.rules.defaults import sum_over_ranks

SLEEP_SECONDS = 120.0  # longer than any test waits
SLOW_SECONDS = 0.2
SPIN_SECONDS = 1.5


def resolve(rules: Mapping[str, str]) -> Rules:
    """The correct rules but for the trouble."""
    if not rules:
        return CORRECT
    trouble, rank, step = rules["trouble"], int(rules.get("rank", "1")), int(rules.get("step", "0"))

    to_spin = [SPIN_SECONDS]

    def reduce(partial: Tensor, comm: Comm) -> Tensor:
        if comm.rank == rank and comm.step == step:
            if trouble == "raise":
                raise ArithmeticError("trouble was asked for")
            if trouble == "refuse":
                raise RequestError("this rank alone refuses")
            if trouble == "skip":
                return partial
            if trouble == "spin":
                _compute_until(time.monotonic() + (to_spin.pop() if to_spin else 0))
            else:
                time.sleep(SLEEP_SECONDS if trouble == "sleep" else SLOW_SECONDS)
        return sum_over_ranks(partial, comm)

    return replace(CORRECT, reduce=reduce)


def _compute_until(deadline: float) -> None:
    while time.monotonic() < deadline:
        pass


if __name__ == "__main__":
    serve(resolve)
