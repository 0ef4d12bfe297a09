"""The version of Lockstep, the one place where it stands."""

__version__ = "0.2.0"
