"""Lockstep: a debugger for LLM inference."""
