"""How many cores and how much memory a process may use here, and whether the kernel has killed for want of memory.
Torch-free."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

from lockstep.engine.text import bytes_text

#: Where control groups are mounted, and where a process finds its own.
_GROUPS, _OWN = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
_COUNTERS = Path("/proc/vmstat")
#: Folder of the memory controller below the mount; limit, usage, and what of the usage is file cache that goes when it
#: is needed: of version 2, then 1 (the kernel's documentation, cgroup-v2.rst and cgroup-v1/memory.rst).
_VERSIONS = (
    ("", "memory.max", "memory.current", "inactive_file"),
    ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)
#: Likewise of the CPU controller: where the microseconds of a period stand that a group may run, and the period's.
_CPU_VERSIONS = (("", ("cpu.max",)), ("cpu", ("cpu.cfs_quota_us", "cpu.cfs_period_us")))

#: What makes a run take less.
LESS_MEMORY = "--chunk N, fewer taps (--capture), a smaller --dtype, or a shorter prompt"


#: Parameters of the C library's allocator (mallopt(3)): their numbers and values. By itself it gives the pages of what
#: was freed back at once, and has the kernel clear them anew for the next ones.
_MALLOPT = {"M_MMAP_THRESHOLD": (-3, 32 << 20), "M_TRIM_THRESHOLD": (-1, 256 << 20)}


def keep_freed_pages() -> bool:
    """Have this process keep up to 256 MiB that it has freed, for what it computes next; whether the C library takes it
    (glibc does). Faults of such pages are a third of a decode step with statistics."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):  # another C library, or none that can be asked
        return False
    return all(mallopt(number, value) == 1 for number, value in _MALLOPT.values())


def full_gpu(message: str) -> str:
    """What torch's OutOfMemoryError reports, without its advice on torch's own settings, and what takes less."""
    reported = (
        message.partition(" Process ")[0].partition(" Including ")[0].partition(" Of the allocated ")[0]
    )
    return f"{reported.rstrip('. ')}. Use {LESS_MEMORY}; or --device cpu"


def free_memory(groups: Path = _GROUPS, own: Path = _OWN) -> int:
    """Bytes that processes which start now may take: what is available, with free swap, and no more than the limits of
    the control groups (of a container) leave."""
    machine: int = psutil.virtual_memory().available + psutil.swap_memory().free
    return max(0, min([machine, *_left_in_groups(groups, own)]))


def usable_cores(groups: Path = _GROUPS, own: Path = _OWN) -> int:
    """Cores that this process may use, at least 1: those that it may be scheduled on, and no more than the quotas of
    its control groups give (a container of `--cpus 2` on a machine of 64)."""
    affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min([affinity, *_cores_of_groups(groups, own)]))


def default_threads(processes: int = 1) -> int:
    """Threads that each of so many processes computes with where nobody sets it: what the environment's
    OMP_NUM_THREADS asks for, as torch itself does, or its share of the cores."""
    asked = os.environ.get("OMP_NUM_THREADS", "")
    if asked.isdigit() and int(asked) > 0:
        return int(asked)
    return max(1, usable_cores() // processes)


def _left_in_groups(groups: Path, own: Path) -> Iterator[int]:
    """What each group that this process is in, and each around it, may still take."""
    for controller, limit, usage, cache in _VERSIONS:
        for folder in _groups_around(controller, groups, own):
            most, used = _read(folder / limit).strip(), _read(folder / usage).strip()
            if most.isdigit() and used.isdigit():  # "max" is no limit, and at the root there is none
                yield int(most) - int(used) + (_counter(folder / "memory.stat", cache) or 0)


def _cores_of_groups(groups: Path, own: Path) -> Iterator[int]:
    """Cores that the quota of each group around this process comes to, rounded up; none of one without a quota."""
    for controller, files in _CPU_VERSIONS:
        for folder in _groups_around(controller, groups, own):
            words = " ".join(_read(folder / file) for file in files).split()
            if len(words) == 2 and all(word.isdigit() for word in words):  # "max", or -1: no quota
                yield -(-int(words[0]) // max(1, int(words[1])))


def _groups_around(controller: str, groups: Path, own: Path) -> Iterator[Path]:
    """The folder of the group of a controller ("": version 2) that this process is in, and those around it."""
    named = [line.split(":", 2) for line in _read(own).splitlines() if line.count(":") >= 2]
    mine = next((path for _, kinds, path in named if controller in kinds.split(",")), "/")
    inside = groups / controller / mine.strip("/")
    for folder in (inside, *inside.parents):
        yield folder
        if folder == groups:
            break


def _counter(file: Path, name: str) -> int | None:
    """A number of a file of lines "name number"; None where it is not there."""
    for line in _read(file).splitlines():
        key, _, value = line.partition(" ")
        if key == name and value.strip().isdigit():
            return int(value)
    return None


def _read(file: Path) -> str:
    try:
        return file.read_text()
    except OSError:  # another system, or a file that this user may not read
        return ""


@dataclass(frozen=True, slots=True)
class MemoryBefore:
    """The machine when a process was started: bytes free, and how many processes its kernel had killed for want of
    memory (None: it does not report it)."""

    free: int
    kills: int | None

    @classmethod
    def now(cls) -> MemoryBefore:
        """As it is."""
        return cls(free_memory(), _counter(_COUNTERS, "oom_kill"))

    def killed(self, now: int | None = None) -> str:
        """How a process that ended by SIGKILL came to that: the kernel kills so when memory runs out, and where it has
        counted no such kill since, somebody else did. `now` is its count (None: looked up)."""
        now = _counter(_COUNTERS, "oom_kill") if now is None else now
        if self.kills is not None and now == self.kills:
            return "killed by SIGKILL"
        return (
            "killed by SIGKILL, which is what the kernel does when memory runs out: "
            f"{bytes_text(self.free)} were free when it started; use {LESS_MEMORY}"
        )
