"""A rank that knows the whole catalogue: `python -m lockstep.engine.faults.rank SPEC`."""

from __future__ import annotations

from lockstep.engine.children import loading

if __name__ == "__main__":
    with loading():
        from lockstep.engine.faults.resolve import resolve
        from lockstep.engine.ranks.worker import serve
    serve(resolve)
