"""The embedded demo model: a small Qwen2 checkpoint whose answers can be checked.

Importing this package loads no torch, so the interface can offer the demo without paying for it.
"""

from __future__ import annotations

from pathlib import Path

from workbench.demo.checker import haiku_has_nonce, nonce_in_question

__all__ = [
    "DEFAULT_PROMPT",
    "DEMOS",
    "GGUF_DIR",
    "MODEL_DIR",
    "demo_path",
    "haiku_has_nonce",
    "nonce_in_question",
]

#: A Hugging Face directory: config, tokenizer and bf16 weights.
MODEL_DIR: Path = Path(__file__).resolve().parent / "model"

#: The same model in GGUF files.
GGUF_DIR: Path = Path(__file__).resolve().parent / "gguf"

#: The names that MODEL may be, each for another file of the demo model.
DEMOS: tuple[str, ...] = ("demo", "demo-f16", "demo-q8_0", "demo-q4_k_m")

#: A question the model never saw in training (its nonce is held out by `train.corpus.is_unseen`).
DEFAULT_PROMPT: str = "Write a haiku about rain with the word zorblat"


def demo_path(name: str) -> Path | None:
    """The checkpoint that a name of `DEMOS` stands for, None for another name. F16, which is as large as the checkpoint
    itself, is made from it when it is first asked for, and kept in the cache."""
    if name not in DEMOS:
        return None
    if name == "demo":
        return MODEL_DIR
    if name != "demo-f16":
        return GGUF_DIR / f"{name}.gguf"
    # Imported here: gguf-py takes a while, and only this file needs it.
    from workbench.demo.quantise import f16

    return f16()
