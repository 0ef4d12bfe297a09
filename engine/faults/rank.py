"""A rank that knows the whole catalogue: `python -m engine.faults.rank SPEC`."""

from __future__ import annotations

from engine.faults.resolve import resolve
from engine.ranks.worker import serve

if __name__ == "__main__":
    serve(resolve)
