"""From names of faults to `Rules`: done in the ranks only, for it loads torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from lockstep.engine.errors import ConfigError
from lockstep.engine.faults.catalogue import faults_of
from lockstep.engine.rules import CORRECT, Rules


def resolve(rules: Mapping[str, str]) -> Rules:
    """Rule names and values -> the seams of a run. ConfigError for what the catalogue does not know."""
    seams: dict[str, Callable[..., Any]] = {}
    replaced_by: dict[str, str] = {}
    for fault in faults_of(rules):
        for seam, replacement in fault.patch.items():
            if seam in seams:
                raise ConfigError(
                    f"faults {replaced_by[seam]} and {fault.seam} act on the same seam: use one of them"
                )
            seams[seam], replaced_by[seam] = replacement, fault.seam
    return replace(CORRECT, **seams)
