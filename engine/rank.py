"""A rank that knows only the correct rules: `python -m engine.rank SPEC`."""

from __future__ import annotations

from collections.abc import Mapping

from engine.errors import ConfigError
from engine.rules import CORRECT, Rules
from engine.worker import serve


def resolve(rules: Mapping[str, str]) -> Rules:
    """No rule but the defaults."""
    if rules:
        raise ConfigError(f"this rank program knows no rule {', '.join(sorted(rules))}")
    return CORRECT


if __name__ == "__main__":
    serve(resolve)
