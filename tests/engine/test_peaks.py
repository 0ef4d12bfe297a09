"""What a process holds, and the most that it has held."""

from __future__ import annotations

import numpy as np

from lockstep.engine.peaks import held_on


def test_a_peak_is_of_what_was_held_since_it_was_asked_for() -> None:
    before = held_on("cpu").now
    x = np.ones(32 << 20, dtype=np.uint8)
    del x
    held = held_on("cpu")
    assert held.peak - before > 30 << 20
    assert held.now - before < 8 << 20
    assert held_on("cpu").peak - before < 8 << 20
