"""All bugs and controls, by name: the open half, the half held out, the unseen, the harmless changes."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from pathlib import Path

from tests.workbench.diagnosis.bugs.bug import DECLARED, Bug

_HARNESS = {"__init__", "all_bugs", "bug", "patched", "recording", "scoring", "sharded"}


def bugs() -> Mapping[str, Bug]:
    """Those of every file beside this one."""
    for path in sorted(Path(__file__).parent.glob("*.py")):
        if path.stem not in _HARNESS and not path.stem.startswith("test_"):
            importlib.import_module(f"{__package__}.{path.stem}")
    return DECLARED
