"""The embedded demo model: a small Qwen2 checkpoint whose answers can be checked.

Importing this package loads no torch, so the interface can offer the demo without paying for it.
"""

from __future__ import annotations

from pathlib import Path

from lockstep.workbench.demo.checker import haiku_has_nonce, nonce_in_question

__all__ = [
    "DEFAULT_PROMPT",
    "GGUF_DIR",
    "MODEL_DIR",
    "haiku_has_nonce",
    "nonce_in_question",
]

#: A Hugging Face directory: config, tokenizer and bf16 weights.
MODEL_DIR: Path = Path(__file__).resolve().parent / "model"

#: The same model in GGUF files.
GGUF_DIR: Path = Path(__file__).resolve().parent / "gguf"

#: A question the model never saw in training (its nonce is held out by `train.corpus.is_unseen`).
DEFAULT_PROMPT: str = "Write a haiku about rain with the word zorblat"
