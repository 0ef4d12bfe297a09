"""What loading costs, by the kernel's own accounts: peak memory and the pages of the file that are touched."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from lockstep.engine.checkpoint import safetensors
from lockstep.engine.checkpoint.resolve import open_checkpoint
from lockstep.engine.parallel import shards
from tests.checkpoints import tiny_checkpoint

#: Both scripts run in a process of their own, as rank 0, with arguments PATH and a list of [tp, mode].
LOAD = """
import json, sys
from pathlib import Path
import torch
from lockstep.engine.parallel import shards
from lockstep.engine.checkpoint import safetensors
from lockstep.engine.checkpoint.load import rank0_shards, shards_of
from lockstep.engine.checkpoint.resolve import open_checkpoint

torch.set_num_threads(1)
model, source = open_checkpoint(Path(sys.argv[1]))
source.read("model.norm.weight").clone()  # warm up torch and the allocator

def load(tp, mode):
    if mode == "whole":
        return [source.read(name) for name in source.names()]
    if mode == "rank0":
        read = rank0_shards(source, model, tp, 0, send=lambda tensor, rank: None, recv=None, dtype="float32")
    else:
        read = shards_of(source, model, tp, 0, dtype="float32")
    plans = {name: shards.plan(name, model, tp, 0) for name in shards.parameters(model)}
    kept = {name: torch.empty(plan.local_shape) for name, plan in plans.items()}
    for name, tensor in read:  # as the engine does: into parameters that were allocated before
        kept[name].copy_(tensor)
        del tensor
    return kept.values()
"""

#: Prints, in KiB, by how much each load raises the peak resident set, and the size of what was loaded.
PEAK = (
    LOAD
    + """
def status(key):
    return int(Path("/proc/self/status").read_text().split(key + ":")[1].split()[0])

found = []
for tp, mode in json.loads(sys.argv[2]):
    Path("/proc/self/clear_refs").write_text("5")  # the peak (VmHWM) starts anew from the present
    before = status("VmRSS")
    kept = load(tp, mode)
    found.append([status("VmHWM") - before, sum(t.numel() * t.element_size() for t in kept) // 1024])
    del kept
print(json.dumps(found))
"""
)

#: Prints, per load and tensor, how many KiB of the file the kernel mapped in for this process to read it.
PAGES = (
    LOAD
    + """
real = safetensors.safe_open

class Watched:
    def __init__(self, file, framework):
        self.name, self.open = None, real(file, framework=framework)
    def __enter__(self):
        self.file = self.open.__enter__()
        return self
    def get_slice(self, name):
        self.name = name
        return self.file.get_slice(name)
    def get_tensor(self, name):
        self.name = name
        return self.file.get_tensor(name)
    def __exit__(self, *error):
        resident, ours = 0, False
        for line in Path("/proc/self/smaps").read_text().splitlines():
            if "-" in line.split()[0]:
                ours = line.endswith(".safetensors")
            elif ours and line.startswith("Rss:"):
                resident += int(line.split()[1])
        touched[self.name] = touched.get(self.name, 0) + resident
        return self.open.__exit__(*error)

safetensors.safe_open = Watched
found = []
for tp, mode in json.loads(sys.argv[2]):
    touched = {}
    load(tp, mode)
    found.append(touched)
print(json.dumps(found))
"""
)


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """About 200 MB, whose largest tensor is 24 MB."""
    return tiny_checkpoint(
        tmp_path_factory.mktemp("large"),
        "qwen2",
        hidden_size=1024,
        intermediate_size=6144,
        num_hidden_layers=2,
        num_attention_heads=8,
        vocab_size=4096,
    )


def _run(script: str, path: Path, loads: list[tuple[int, str]]) -> list[Any]:
    command = [sys.executable, "-c", script, str(path), json.dumps(loads)]
    # glibc otherwise keeps what one load freed for the next, which would then seem to need less.
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536"}
    output = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
    found: list[Any] = json.loads(output)
    return found


needs_proc = pytest.mark.skipif(
    not Path("/proc/self/clear_refs").exists(), reason="memory is measured through Linux's /proc"
)


@pytest.mark.slow
@needs_proc
def test_peak_memory_is_the_shards_and_one_tensor(large: Path) -> None:
    model, source = open_checkpoint(large)
    largest = max(source.info(name).nbytes for name in source.names()) // 1024
    slack = safetensors.PIECE_BYTES // 1024 + 4096  # what is mapped of the file, and odds and ends
    loads = [(1, "shards"), (2, "shards"), (2, "rank0"), (4, "shards"), (4, "rank0"), (4, "whole")]
    for (tp, mode), (growth, kept) in zip(loads, _run(PEAK, large, loads), strict=True):
        plans = [shards.plan(name, model, tp, 0) for name in shards.parameters(model)]
        mine = sum(torch.Size(plan.local_shape).numel() * 4 for plan in plans) // 1024
        if mode == "whole":  # the measurement can show it
            assert growth > mine + largest + slack
        else:
            assert kept == mine
            assert growth <= mine + largest + slack, (tp, mode)


@pytest.mark.slow
@needs_proc
def test_pages_of_other_ranks_rows_are_never_touched(large: Path) -> None:
    """The kernel's own account of the mapped file, beside the source's counter.

    Tensors cut along their rows only: the columns of one rank lie between those of the others on every page.
    """
    model, source = open_checkpoint(large)
    slack = 2 * 2048 + 128  # the kernel may map a huge page (2 MiB) for a fault, at either end
    mine, whole = _run(PAGES, large, [(4, "shards"), (4, "whole")])
    by_rows = [
        name
        for name in shards.parameters(model)
        if shards.plan(name, model, 4, 0).dim == 0 and source.info(name).nbytes > 8 * 2**20
    ]
    assert len(by_rows) == 1 + 2 * 2  # the embedding, gate and up of two layers: 16 and 24 MB
    for name in by_rows:
        size = source.info(name).nbytes // 1024
        assert size // 4 <= mine[name] <= size // 4 + slack, name
        assert whole[name] >= size, name
