"""A rank program that sends and takes no frame above `MOST` bytes: `python -m tests.engine.small_frames_rank SPEC`."""

from __future__ import annotations

from lockstep.engine.faults.resolve import resolve
from lockstep.engine.ranks import wire
from lockstep.engine.ranks.worker import serve

MOST = 1 << 21

if __name__ == "__main__":
    wire.MAX_FRAME = MOST
    serve(resolve)
