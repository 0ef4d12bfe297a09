"""`make clean-axes`: right engines along all axes, in pairs of runs, and how many of them are accused.

    python -m tests.planted_caches.clean [ours] [paged] [transformers] [vllm] [vllm_2] [--axis chunk,prefix]

`--axis` is of vLLM's alone, on one rank and on two, as its runs take minutes: what is known of other axes stays. Writes
clean.json, which docs/planted-caches.md reports on.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

import lockstep
from lockstep.workbench.demo import MODEL_DIR
from lockstep.workbench.exit_codes import UsageError
from tests.checkpoints import tiny_checkpoint
from tests.planted_caches import page
from tests.planted_caches.rows import HERE, CleanPair, CleanPairs, Results
from tests.planted_caches.run import WORDS, on_paged_along, on_vllm_along

FAMILIES = ("qwen2", "llama", "qwen3_moe", "qwen3_next")
PROMPT = [3, 17, 99, 4, 64, 5, 12, 33, 20]


def ours(model: Path) -> lockstep.Invariance:
    """All axes of our own engine."""
    return lockstep.invariant(model, ids=[PROMPT])


def paged(model: Path) -> lockstep.Invariance:
    """All axes of the paged engine; a state has no drafts to take back."""
    axes = [axis for axis in WORDS if axis != "speculation" or "next" not in model.name]
    return on_paged_along(axes, model)


def transformers(model: Path) -> lockstep.Invariance:
    """Batch, order and chunks of a program that uses transformers."""
    words = {"batch": "--one", "order": "--reversed", "chunk": "--chunks"}
    program = HERE / "programs" / "run_transformers.py"
    return lockstep.invariant([sys.executable, str(program), str(model)], variants=words, model=model)


#: By name: on how many ranks, and along which axes.
VLLM = {"vllm": (1, "batch,preempt,chunk,prefix,tp,graph"), "vllm_2": (2, "batch,preempt,chunk,prefix")}
ENGINES: Mapping[str, Callable[[Path], lockstep.Invariance]] = {
    one.__name__: one for one in (ours, paged, transformers)
}


def pairs(engine: str, family: str, folder: Path, axes: str) -> list[CleanPair]:
    """Each variant that was tried of one model on one engine; of vLLM along `axes`, or all that it can be asked for."""
    if engine in VLLM:
        ranks, known = VLLM[engine]
        found = on_vllm_along(axes or known, MODEL_DIR, ranks)
    else:
        found = ENGINES[engine](tiny_checkpoint(folder, family))
    return [
        CleanPair(
            engine,
            family,
            one.axis,
            one.variant,
            one.verdict,
            one.in_words() if one.verdict == "bug" else one.why,
        )
        for one in found.results
        if one.verdict != "not tried"
    ]


def main() -> None:
    """Try what was asked for, or all, and write what came of it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    known = [*ENGINES, *VLLM]
    parser.add_argument("engines", nargs="*", metavar="ENGINE", help=", ".join(known))
    parser.add_argument("--axis", default="")
    asked = parser.parse_args()
    if odd := [one for one in asked.engines if one not in known]:
        raise UsageError(f"{odd[0]} is none of {', '.join(known)}")
    os.environ["PLANTED"] = ""
    with tempfile.TemporaryDirectory(prefix="clean-axes-") as name:
        for engine in asked.engines or known:
            for family in ("demo",) if engine in VLLM else FAMILIES:
                folder = Path(name) / engine / family
                folder.mkdir(parents=True)
                CleanPairs.noted(pairs(engine, family, folder, asked.axis))
                print(engine, family, CleanPairs.load().summary, flush=True)
    page.write(Results.load())


if __name__ == "__main__":
    main()
