"""The demo model's checkpoints by the names that MODEL may be: Hugging Face's and the GGUF files."""

from __future__ import annotations

from pathlib import Path

from lockstep.workbench.demo import GGUF_DIR, MODEL_DIR

DEMOS: tuple[str, ...] = ("demo", "demo-f16", "demo-q8_0", "demo-q4_k_m")


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
    from lockstep.workbench.demo.quantise import f16

    return f16()
