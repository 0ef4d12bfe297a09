"""Whether a kernel may stand in for torch's own operations."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor


def agrees(compute: Callable[[], Tensor], expected: Tensor, bound: float) -> bool:
    """Whether what a kernel computes is off what is expected by at most `bound`, relative to that and a thousandth; 0:
    the same numbers. False as well where Triton is not there, or does not compile."""
    try:
        found = compute().cpu().double()
    except Exception:  # whatever a compiler or a driver throws: torch does it then
        return False
    right = expected.cpu().double()
    return bool(((found - right).abs() <= bound * (right.abs() + 1e-3)).all())
