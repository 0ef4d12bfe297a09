"""Hypotheses of the rotation of queries and keys: conventions of its pairs, positions, frequencies, precision."""
