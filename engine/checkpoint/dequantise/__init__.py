"""Quantised weights to float32: what the blocks of each GGUF type mean."""

from lockstep.engine.checkpoint.dequantise.blocks import dequantise, steps
from lockstep.engine.checkpoint.dequantise.encodings import SUPPORTED

__all__ = ["SUPPORTED", "dequantise", "steps"]
