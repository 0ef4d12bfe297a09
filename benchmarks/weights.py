"""`lockstep weights` at 0.5B shapes: what two ranks hold against the checkpoint, right and with one mistake at a time.

    python -m benchmarks.weights [--only NAME]

Seconds of the comparison, by the clock and of the process's CPU; to hold: 10.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

import torch

from benchmarks.model import half_billion
from lockstep.workbench.diagnosis.loaded.checkpoint import LoadedFrom
from lockstep.workbench.diagnosis.loaded.compare import LoadedWeights, compare_weights
from lockstep.workbench.diagnosis.loaded.rank_weights import read_ranks
from tests.workbench.diagnosis.loaded.ranks import Bug, State, shard, whole_of, written

RANKS, KV_HEADS = 2, 2
_DOWN, _GATE_UP = "model.layers.1.mlp.down_proj.weight", "model.layers.1.mlp.gate_up_proj.weight"
_EMBED = "model.embed_tokens.weight"


def _exchanged(name: str) -> Bug:
    def bug(states: list[State]) -> None:
        states[0][name], states[1][name] = states[1][name], states[0][name]

    return bug


def _of_the_next_layer(states: list[State]) -> None:
    for state in states:
        state[_DOWN] = state[_DOWN.replace("1", "2", 1)]


def _stale(states: list[State]) -> None:
    for state in states:
        for name in [one for one in state if "mlp" in one and one.endswith("_proj.weight")]:
            state[name] = state[name] + 0.05 * state[name].std() * torch.randn(state[name].shape)


MISTAKES: Mapping[str, Bug] = {
    "none": lambda states: None,
    "a matrix of the next layer": _of_the_next_layer,
    "rows of the other rank": _exchanged(_GATE_UP),
    "vocabulary of the other rank": _exchanged(_EMBED),
    "all MLPs stale": _stale,
}


def measured(checkpoint: Path, mistake: Bug) -> tuple[LoadedWeights, float, float]:
    """What is found, and its seconds by the clock and of the CPU."""
    whole = whole_of(checkpoint)
    states = [shard(whole, rank, RANKS, KV_HEADS, torch.bfloat16) for rank in range(RANKS)]
    mistake(states)
    with tempfile.TemporaryDirectory() as folder, LoadedFrom.open(checkpoint) as opened:
        dump = written(Path(folder), states)
        del whole, states
        clock, cpu = time.perf_counter(), time.process_time()
        found = compare_weights(read_ranks(dump), opened)
        return found, time.perf_counter() - clock, time.process_time() - cpu


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", choices=MISTAKES)
    only = parser.parse_args().only
    torch.manual_seed(0)
    checkpoint = half_billion()
    for name, mistake in MISTAKES.items():
        if only in (None, name):
            found, clock, cpu = measured(checkpoint, mistake)
            kinds = ", ".join(sorted({one.mistake.kind for one in found.wrong})) or "nothing"
            print(
                f"{name}: {found.compared} parameters, {kinds}: {clock:.1f} s, {cpu:.1f} s of CPU", flush=True
            )


if __name__ == "__main__":
    main()
