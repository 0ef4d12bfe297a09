"""What a step's tensors are kept as until they are measured, where they are not copied at once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from torch import Tensor

from lockstep.engine.run.sampling import Sampling
from lockstep.engine.taps.hub import CapturePolicy
from lockstep.engine.taps.ledger import StatisticsLedger
from lockstep.engine.taps.measure import tensor_checksum
from tests.checkpoints import FAMILY_VARIANTS, VARIANTS
from tests.engine.harness import local_runner
from tests.engine.test_logits import RAGGED


@pytest.mark.sampled(16)
@pytest.mark.parametrize("name", [*VARIANTS, *FAMILY_VARIANTS])
def test_only_the_taps_that_state_it_are_overwritten_within_a_step(
    name: str, variant: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU all others are measured at the end of the step."""
    runner = local_runner(variant(name))
    seen: list[tuple[int, Tensor, int]] = []
    ledger, add = runner.hub.ledger, StatisticsLedger.add

    def kept(own: StatisticsLedger, tap: int, x: Tensor, masked: int = 0) -> None:
        seen.append((tap, x, tensor_checksum(x)))
        add(own, tap, x, masked)

    monkeypatch.setattr(StatisticsLedger, "add", kept)
    runner.watch(CapturePolicy(statistics=True))
    for seq, prompt in enumerate(RAGGED):
        runner.add(seq, prompt, Sampling())
    changed = set()
    for _ in range(3):
        seen.clear()
        runner.step()
        assert len(seen) >= len(runner.specs)
        changed |= {tap for tap, x, checksum in seen if tensor_checksum(x) != checksum}
    names = [runner.specs[tap].name for tap in changed - ledger.overwritten]
    assert not names
    assert changed, "the cache's rows share one buffer"
