"""All bugs and controls, by name: the open half, the half held out, the unseen, the harmless changes."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from pathlib import Path

from tests.workbench.diagnosis.bugs.bug import DECLARED, Bug

_FOLDER = Path(__file__).parent


def bugs() -> Mapping[str, Bug]:
    """Those of every folder beside this file."""
    for path in sorted(_FOLDER.glob("*/*.py")):
        importlib.import_module(f"{__package__}.{path.parent.name}.{path.stem}")
    return DECLARED
