"""What a process holds, and the most that it has held."""

from __future__ import annotations

import mmap

from lockstep.engine.peaks import held_on


def test_a_peak_is_of_what_was_held_since_it_was_asked_for() -> None:
    before = held_on("cpu").now
    # Not from the heap, where pages that were freed before are used again, which are counted already.
    with mmap.mmap(-1, 32 << 20) as pages:
        pages.write(b"1" * (32 << 20))
    held = held_on("cpu")
    assert held.peak - before > 30 << 20
    assert held.now - before < 8 << 20
    assert held_on("cpu").peak - before < 8 << 20
