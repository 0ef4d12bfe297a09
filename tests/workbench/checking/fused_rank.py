"""A rank whose fused attention, and nothing else, is a little wrong: a rank program for tests."""

from __future__ import annotations

from lockstep.engine.faults.resolve import resolve
from lockstep.engine.layers.attention import Attention
from lockstep.engine.ranks.worker import serve

if __name__ == "__main__":
    right = Attention._fused
    Attention._fused = lambda *args: 1.01 * right(*args)  # type: ignore[method-assign]
    serve(resolve)
