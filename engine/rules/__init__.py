"""The seams at which a fault may replace the correct behaviour, and that behaviour."""

from lockstep.engine.rules.rules import CORRECT, Rules

__all__ = ["CORRECT", "Rules"]
