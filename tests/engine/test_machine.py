"""What memory is left, by the machine and by control groups, and how a kill for want of it is reported."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import torch

from lockstep.engine.machine import MemoryBefore, default_threads, free_memory, usable_cores
from lockstep.engine.ranks.reports import CommandFailure


def group(folder: Path, names: tuple[str, str, str], limit: str, used: int, cache: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, reported in zip(
        names, (limit, str(used), f"anon 5\n{cache_name(names)} {cache}\n"), strict=True
    ):
        (folder / name).write_text(f"{reported}\n")


def cache_name(names: tuple[str, str, str]) -> str:
    return "inactive_file" if names == V2 else "total_inactive_file"


V2 = ("memory.max", "memory.current", "memory.stat")
V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "memory.stat")


@pytest.mark.parametrize(("version", "own"), [(V2, "0::/a/b\n"), (V1, "7:pids:/x\n4:cpu,memory:/a/b\n")])
def test_the_tightest_group_around_the_process_counts(
    version: tuple[str, str, str], own: str, tmp_path: Path
) -> None:
    (tmp_path / "own").write_text(own)
    root = tmp_path / "groups"
    memory = root / "memory" if version is V1 else root
    group(memory / "a" / "b", version, "max" if version is V2 else str(2**62), 10, 0)
    group(memory / "a", version, str(3000), 2500, 400)
    group(memory / "other", version, str(1), 1, 0)
    assert free_memory(root, tmp_path / "own") == 900
    group(memory / "a" / "b", version, str(100), 150, 0)  # over its limit
    assert free_memory(root, tmp_path / "own") == 0


def test_without_groups_the_machine_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    memory, swap = psutil.virtual_memory(), psutil.swap_memory()
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory._replace(available=70))
    monkeypatch.setattr(psutil, "swap_memory", lambda: swap._replace(free=7))
    assert free_memory(tmp_path, tmp_path / "none") == 77


@pytest.mark.parametrize("version", [1, 2])
def test_a_quota_of_a_group_around_the_process_bounds_its_cores(version: int, tmp_path: Path) -> None:
    (tmp_path / "own").write_text("0::/a/b\n" if version == 2 else "7:pids:/x\n4:cpu,cpuacct:/a/b\n")
    root = tmp_path / "groups"
    cpu = root if version == 2 else root / "cpu"

    def quota(folder: Path, microseconds: int | None) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        if version == 2:
            (folder / "cpu.max").write_text(f"{microseconds or 'max'} 100000\n")
        else:
            (folder / "cpu.cfs_quota_us").write_text(f"{microseconds or -1}\n")
            (folder / "cpu.cfs_period_us").write_text("100000\n")

    quota(cpu / "a" / "b", None)
    assert usable_cores(root, tmp_path / "own") == len(os.sched_getaffinity(0))
    quota(cpu / "a", 50_000)
    quota(cpu / "other", 1000)
    assert usable_cores(root, tmp_path / "own") == 1
    quota(cpu / "a", 150_000 + 100_000 * len(os.sched_getaffinity(0)))  # more than the machine has
    assert usable_cores(root, tmp_path / "own") == len(os.sched_getaffinity(0))


@pytest.mark.parametrize(("asked", "expected"), [("3", 3), ("", None), ("many", None), ("0", None)])
def test_threads_are_those_that_the_environment_asks_for(
    asked: str, expected: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", asked)
    assert default_threads(2) == (expected or max(1, usable_cores() // 2))


def test_a_kill_by_the_kernel_is_distinguished_from_one_by_somebody() -> None:
    before = MemoryBefore(3 << 30, 4)
    assert before.killed(now=4) == "killed by SIGKILL"
    for reported in (before.killed(now=5), MemoryBefore(3 << 30, None).killed()):
        assert "the kernel does when memory runs out: 3.0 GiB were free when it started" in reported
        assert "--chunk" in reported


def test_a_full_gpu_is_reported_with_what_takes_less() -> None:
    """In torch's own words of 2.11, as far as they are of use."""
    message = (
        "CUDA out of memory. Tried to allocate 1.02 GiB. GPU 0 has a total capacity of 79.18 GiB of which 698.56 MiB "
        "is free. Process 1 has 78.49 GiB memory in use. Of the allocated memory 0 bytes is allocated by PyTorch, and "
        "0 bytes is reserved by PyTorch but unallocated. If reserved but unallocated memory is large try setting "
        "PYTORCH_ALLOC_CONF=expandable_segments:True to avoid fragmentation."
    )
    failure = CommandFailure.of(torch.OutOfMemoryError(message))
    assert failure.message == (
        "CUDA out of memory. Tried to allocate 1.02 GiB. GPU 0 has a total capacity of 79.18 GiB of which 698.56 MiB "
        "is free. Use --chunk N, fewer taps (--capture), a smaller --dtype, or a shorter prompt; or --device cpu"
    )
    assert not failure.expected


#: Faults of pages of twenty temporaries of 16 MiB, once as many have been there.
FAULTS = """
import resource
import torch
from lockstep.engine.machine import keep_freed_pages
assert keep_freed_pages()
for _ in range(20):
    torch.ones(1 << 22)
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(20):
    torch.ones(1 << 22)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another allocator")
def test_pages_that_were_freed_are_kept_for_what_comes_next() -> None:
    done = subprocess.run([sys.executable, "-c", FAULTS], capture_output=True, text=True, check=True)
    pages = 20 * (16 << 20) // os.sysconf("SC_PAGE_SIZE")
    assert int(done.stdout) < pages / 20
