"""What a session says of itself: what was run, how, on what checkpoint, by which versions (torch-free)."""

from __future__ import annotations

import platform
from dataclasses import asdict
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.checkpoint.resolve import open_checkpoint

if TYPE_CHECKING:
    from workbench.inferior.inferior import Inferior

#: Whose versions decide what numbers come out.
_LIBRARIES = ("lockstep", "torch", "transformers")


def session_meta(inferior: Inferior) -> dict[str, Any]:
    """All that is needed to run an inferior's sequences again from the start, and to know where they came from."""
    config = inferior.config
    return {
        "model": asdict(inferior.model),
        "model_path": str(inferior.path),
        "config": asdict(config),
        "tp": config.tp,
        "dtype": config.dtype,
        "device": config.device,
        "backend": inferior.client.backend,
        "rules": inferior.rules,
        "capture": asdict(inferior.capture),
        "sequences": {
            str(seq): {"prompt_ids": state.ids[: state.prompt_length], "sampling": asdict(state.sampling)}
            for seq, state in inferior.sequences.items()
        },
        **identity(inferior.path),
    }


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
