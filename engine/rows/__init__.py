"""Decode steps of few sequences in float32 on a CPU: products that read each matrix once, and what stands between."""
