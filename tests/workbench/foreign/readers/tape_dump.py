"""The smallest dump of docs/tap-format.md, by another hand than lockstep_tap's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

FACTS = {"format": "lockstep-tape", "version": 1, "rank": 0, "size": 1}
LINE: dict[str, Any] = {
    "pass": 0, "ids": [5, 6], "positions": [0, 1], "requests": None, "file": "pass00000.safetensors",
    "taps": [{"name": "embed", "key": "0", "layout": "replicate"}],
}  # fmt: skip
X = np.arange(6, dtype=np.float32).reshape(2, 3)


def dump(
    folder: Path, facts: dict[str, Any] | None = None, lines: list[dict[str, Any]] | None = None
) -> Path:
    """Write it: `facts` and `lines` in place of its own."""
    reported = FACTS | (facts or {})
    home = folder / f"rank{reported['rank']}"
    home.mkdir(parents=True)
    (home / "tape.json").write_text(json.dumps(reported))
    (home / "passes.jsonl").write_text("".join(json.dumps(one) + "\n" for one in lines or [LINE]))
    save_file({"0": X}, home / "pass00000.safetensors")
    return folder
