"""Names of the checkpoints' modules that differ from Llama's, by family (torch-free)."""

from __future__ import annotations

from collections.abc import Mapping

from lockstep.engine.config import Family

#: Family -> tap -> module within the layer.
MODULES: Mapping[Family, Mapping[str, str]] = {}
