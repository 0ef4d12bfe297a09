"""A rank that knows the whole catalogue: `python -m engine.faults.rank SPEC`."""

from __future__ import annotations

from engine.children import loading

if __name__ == "__main__":
    with loading():
        from engine.faults.resolve import resolve
        from engine.ranks.worker import serve
    serve(resolve)
