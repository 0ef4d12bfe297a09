"""Hypotheses about what ran instead."""
