"""A rank that knows only the correct rules: `python -m lockstep.engine.ranks SPEC`."""

from __future__ import annotations

from collections.abc import Mapping

from lockstep.engine.errors import ConfigError
from lockstep.engine.ranks.worker import serve
from lockstep.engine.rules import CORRECT, Rules


def resolve(rules: Mapping[str, str]) -> Rules:
    """No rule but the defaults."""
    if rules:
        raise ConfigError(f"this rank program knows no fault {', '.join(sorted(rules))}")
    return CORRECT


if __name__ == "__main__":
    serve(resolve)
