"""Variants of the rotation of queries and keys: pairs, positions, frequencies."""
