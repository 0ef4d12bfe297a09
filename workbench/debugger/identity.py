"""What a session says of where it came from: checkpoint and library versions (torch-free)."""

from __future__ import annotations

import platform
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from engine.checkpoint.resolve import open_checkpoint

#: Whose versions decide what numbers come out.
_LIBRARIES = ("lockstep", "torch", "transformers")


def identity(checkpoint: Path) -> dict[str, Any]:
    """The checkpoint's digest (which samples large tensors) and the versions of what runs it."""
    _, source = open_checkpoint(checkpoint)
    with source:
        return {"checkpoint": source.digest(), "versions": versions()}


@cache
def versions() -> dict[str, str]:
    """Name -> version of the libraries and of Python; what is not installed is left out."""
    found = {"python": platform.python_version()}
    for name in _LIBRARIES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found
