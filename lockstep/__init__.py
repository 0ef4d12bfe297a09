"""Lockstep: a debugger for LLM inference."""

__version__ = "0.2.0"
