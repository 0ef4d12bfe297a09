"""What a session says of itself: what was run, how, on what checkpoint, by which versions (torch-free)."""

from __future__ import annotations

import platform
from dataclasses import asdict
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from engine.checkpoint.resolve import open_checkpoint
from sessions.meta import SessionMeta

if TYPE_CHECKING:
    from workbench.inferior.inferior import Inferior

#: Whose versions decide what numbers come out.
_LIBRARIES = ("lockstep", "torch", "transformers")


def session_meta(inferior: Inferior, told: SessionMeta) -> SessionMeta:
    """`told`, and all that is needed to run an inferior's sequences again from the start, and to know where they came
    from."""
    model = asdict(inferior.model) | {
        "name": told.model.name,
        "path": str(inferior.path),
        "checkpoint": checkpoint_digest(inferior.path),
    }
    sequences = {
        seq: {"prompt_ids": state.ids[: state.prompt_length], "sampling": asdict(state.sampling)}
        for seq, state in inferior.sequences.items()
    }
    run: dict[str, Any] = {
        "model": model,
        "config": asdict(inferior.config) | {"backend": inferior.client.backend},
        "rules": dict(inferior.rules),
        "capture": asdict(inferior.capture),
        "sequences": sequences,
        "versions": versions(),
    }
    return msgspec.convert(msgspec.structs.asdict(told) | run, SessionMeta)


def checkpoint_digest(checkpoint: Path) -> str:
    """The digest of a checkpoint's tensors (which samples large ones)."""
    _, source = open_checkpoint(checkpoint)
    with source:
        return source.digest()


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
