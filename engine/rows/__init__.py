"""Decode steps of a row or two in float32 on a CPU: products that read their matrices once, and what stands between."""
