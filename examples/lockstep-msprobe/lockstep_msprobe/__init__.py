"""msprobe's dumps for `lockstep import msprobe`."""

from lockstep_msprobe.reader import open_msprobe

__all__ = ["open_msprobe"]
