"""What decides the numbers of a run: the checkpoint's digest and the versions of the libraries (torch-free)."""

from __future__ import annotations

import platform
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from lockstep.engine.checkpoint.resolve import open_checkpoint
from lockstep.version import __version__

#: Whose versions decide what numbers come out.
_LIBRARIES = ("torch", "transformers")


def checkpoint_digest(checkpoint: Path) -> str:
    """The digest of a checkpoint's tensors (which samples large ones)."""
    _, source = open_checkpoint(checkpoint)
    with source:
        return source.digest()


@cache
def versions() -> dict[str, str]:
    """Name -> version of the libraries and of Python; what is not installed is left out."""
    found = {"python": platform.python_version(), "lockstep": __version__}
    for name in _LIBRARIES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found
