"""Trials of what a stranger puts into a model."""

from __future__ import annotations

import resource
from pathlib import Path

from lockstep.workbench.models.tokenizer_messages import MEMORY
from tests.workbench.models.hostile_tokenizers import KINDS, use


def use_tokenizer(seed: int, directory: Path) -> None:
    """A tokenizer of each kind: it encodes and decodes, or is one error, within its memory."""
    kind = list(KINDS)[seed]
    folder = directory / "model"
    folder.mkdir()
    KINDS[kind](folder)
    error = use(folder)
    assert "\n" not in error, f"{kind}: {error}"
    assert not error or str(folder) in error, f"{kind}: {error}"
    largest = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024
    assert largest <= MEMORY, f"{kind}: {largest} bytes"
