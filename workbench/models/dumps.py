"""The formats of other engines' dumps, by the names of their files: what a folder is, before anything is read."""

from __future__ import annotations

from pathlib import Path

#: Format -> globs in the folder, one of which finds what this format alone has.
SIGNS: dict[str, tuple[str, ...]] = {
    "lockstep": ("rank*/tape.json",),
    "sglang": ("TP*_PP*_Rank*_pid*",),
    "sglang-dumper": ("step=*___rank=*___*.pt", "*/step=*___rank=*___*.pt"),
    "llamacpp": ("pass*/ids.npy", "llamacpp-*-tokens.bin"),
    "transformers": ("*_debug_tree_FULL_TENSORS.json", "*/*_debug_tree_FULL_TENSORS.json"),
}


def recognised(folder: Path) -> list[str]:
    """The formats that a folder has a file or folder of, by names alone."""
    return [name for name, signs in SIGNS.items() if any(any(folder.glob(sign)) for sign in signs)]
