"""nano-vllm as anyone would use it, on a CPU with the stand-ins of its own test: MODEL RANKS, tokens to stdout."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from workload import BATCHES, planted

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "workbench" / "attach"))
import nano_program


def decode_one_position_too_far() -> None:
    """The position of a new token is the length with it."""
    from nanovllm.engine.model_runner import ModelRunner

    prepare = ModelRunner.prepare_decode

    def prepare_decode(self: Any, seqs: Any) -> tuple[Any, Any]:
        ids, positions = prepare(self, seqs)
        return ids, positions + 1

    ModelRunner.prepare_decode = prepare_decode


BUGS: dict[str, Callable[[], None]] = {"decode_one_position_too_far": decode_one_position_too_far}

if __name__ == "__main__":
    if planted():
        BUGS[planted()]()
    prompts = ";".join(",".join(map(str, ids)) for batch in BATCHES for ids, _ in batch)
    sys.argv = [sys.argv[0], sys.argv[1], prompts]
    nano_program.main()
