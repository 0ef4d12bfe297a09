"""What attaching to an engine costs: `python -m benchmarks.attach`."""
