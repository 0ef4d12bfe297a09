"""What this machine has, and what Lockstep needs of it. torch is only loaded by processes of their own: a broken
installation may crash, and then reports it on one line."""

from __future__ import annotations

import locale
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from typing import Literal

import msgspec
import psutil
from packaging.requirements import Requirement

from lockstep.engine import extras
from lockstep.engine.children import names_working_directory, start_python
from lockstep.engine.config import EngineConfig
from lockstep.engine.errors import EngineError
from lockstep.engine.extras import DISTRIBUTION
from lockstep.engine.folders import private_folder, state_directory
from lockstep.engine.machine import free_memory, usable_cores
from lockstep.engine.ranks.client import Client
from lockstep.engine.ranks.messages import Ping
from lockstep.engine.scratch import ScratchFolder
from lockstep.workbench.demo import MODEL_DIR
from lockstep.workbench.paths import cache_directory, data_directory

Level = Literal["ok", "note", "bad"]

_PROBE = """
import json, torch, torch.distributed as d
gpus = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
print(json.dumps({
    "version": torch.__version__, "built_for_cuda": torch.version.cuda,
    "gloo": d.is_available() and d.is_gloo_available(), "nccl": d.is_available() and d.is_nccl_available(),
    "gpus": [[g.name, g.total_memory, f"{g.major}.{g.minor}"] for g in gpus],
}))
"""
_SECONDS = 120.0
_LEAST_MEMORY, _LEAST_DISK = 2 << 30, 1 << 30


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing looked at. "note": works, but worth knowing. `advice` is what to do, "" where nothing is."""

    what: str
    level: Level
    found: str
    advice: str = ""


def examine() -> Iterator[Finding]:
    """Everything, cheapest first; each finding as soon as it is made."""
    yield _python()
    yield from _packages()
    yield _search_paths()
    yield _memory()
    yield _directory("data", data_directory(), "LOCKSTEP_DATA_DIR")
    yield _directory("cache", cache_directory(), "LOCKSTEP_CACHE_DIR")
    yield _directory("state", state_directory(), "LOCKSTEP_STATE_DIR")
    yield _temporary()
    yield _terminal()
    yield _demo()
    if not extras.is_installed("engine"):
        return
    torch = _probe_torch()
    if isinstance(torch, Finding):
        yield torch
        return
    yield Finding("torch", "ok", f"{torch.version} loads")
    yield _gpus(torch)
    yield _collectives(torch)
    yield _ranks()


def _python() -> Finding:
    return Finding(
        "python", "ok", f"{sys.version.split()[0]} at {sys.executable}"
    )  # older ones cannot install this


def _packages() -> Iterator[Finding]:
    """Each dependency as the project declares it, held against what is installed; then those of each extra."""
    try:
        declared = [Requirement(line) for line in requires(DISTRIBUTION) or ()]
    except PackageNotFoundError:
        yield Finding("packages", "note", f"{DISTRIBUTION} is not installed: this runs from its source")
        return
    yield from _as_required("packages", _wanted(declared, ""), "textual")
    for extra in extras.EXTRAS:
        if extras.is_installed(extra):
            added = [one for one in _wanted(declared, extra) if one not in _wanted(declared, "")]
            yield from _as_required(f"extra {extra}", added, "transformers")
        else:
            yield Finding(f"extra {extra}", "note", "not installed", extras.install(extra))


def _wanted(declared: Sequence[Requirement], extra: str) -> list[Requirement]:
    return [one for one in declared if one.marker is None or one.marker.evaluate({"extra": extra})]


def _as_required(what: str, wanted: Sequence[Requirement], named: str) -> Iterator[Finding]:
    """One finding for all that is as it should be, with the version of `named`, and one for each that is not."""
    good = {}
    for requirement in wanted:
        asked = f"{requirement.name}{requirement.specifier}"
        try:
            installed = version(requirement.name)
        except PackageNotFoundError:
            yield Finding(what, "bad", f"{requirement.name} is missing", f"pip install '{asked}'")
            continue
        if requirement.specifier.contains(installed, prereleases=True):
            good[requirement.name] = installed
        else:
            found = f"{requirement.name} {installed} is not {requirement.specifier}"
            yield Finding(what, "bad", found, f"pip install '{asked}'")
    shown = f" ({named} {good[named]})" if named in good else ""
    yield Finding(what, "ok", f"{len(good)} of {len(wanted)} as required{shown}")


def _search_paths() -> Finding:
    if not (names := names_working_directory()):
        return Finding("search paths", "ok", "none names the working directory")
    return Finding(
        "search paths", "note", f"{', '.join(names)}: an empty or relative entry means the working directory",
        "programs take code from wherever you are: have absolute entries only",
    )  # fmt: skip


def _memory() -> Finding:
    free = free_memory()
    found = (
        f"{free / 2**30:.1f} of {psutil.virtual_memory().total / 2**30:.1f} GiB free, {usable_cores()} cores"
    )
    if free < _LEAST_MEMORY:
        return Finding("memory", "bad", found, "each rank takes about 0.5 GiB beside its weights: free some")
    return Finding("memory", "ok", found)


def _temporary() -> Finding:
    try:
        with ScratchFolder.make("doctor") as folder:
            return _directory("temporary", folder.path.parent, "TMPDIR")
    except OSError as error:
        return Finding("temporary", "bad", str(error.strerror), "set TMPDIR to a directory of your own")


def _directory(what: str, path: Path, variable: str) -> Finding:
    try:
        private_folder(path)
        with tempfile.TemporaryFile(dir=path) as file:
            file.write(b"lockstep")
            file.flush()
        free = shutil.disk_usage(path).free
    except OSError as error:
        return Finding(
            what, "bad", f"{path}: {error.strerror}", f"set {variable} to a directory that can be written"
        )
    found = f"{path} can be written, {free / 2**30:.1f} GiB free"
    if free < _LEAST_DISK:
        return Finding(what, "note", found, f"little room for sessions: set {variable} to another disk")
    return Finding(what, "ok", found)


def _terminal() -> Finding:
    encoding = (sys.stdout.encoding or locale.getpreferredencoding()).lower().replace("-", "")
    if not sys.stdout.isatty():
        return Finding("terminal", "note", "stdout is not a terminal: commands work, the screens do not")
    columns, lines = shutil.get_terminal_size()
    term = os.environ.get("TERM", "")
    found = f"{term or 'TERM is not set'}, {columns}x{lines}, {encoding}"
    if not encoding.startswith("utf"):
        return Finding("terminal", "bad", found, "the screens draw with Unicode: set LANG=C.UTF-8")
    if term in ("", "dumb"):
        return Finding("terminal", "bad", found, "set TERM=xterm-256color")
    if columns < 80 or lines < 24:
        return Finding("terminal", "note", found, "the screens want 80x24 at least")
    return Finding("terminal", "ok", found)


def _demo() -> Finding:
    if (MODEL_DIR / "model.safetensors").is_file():
        return Finding("demo model", "ok", str(MODEL_DIR))
    return Finding("demo model", "bad", f"not at {MODEL_DIR}", "install again: the package is incomplete")


class TorchBuild(msgspec.Struct, frozen=True):
    """What the installed torch can do, as a process that loads it reports. `gpus`: (name, bytes, capability)."""

    version: str
    built_for_cuda: str | None  # CUDA's version
    gloo: bool
    nccl: bool
    gpus: tuple[tuple[str, int, str], ...]


def _probe_torch() -> TorchBuild | Finding:
    with start_python("-c", _PROBE, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        try:
            out, err = process.communicate(timeout=_SECONDS)
        except subprocess.TimeoutExpired:
            return Finding(
                "torch",
                "bad",
                f"does not load within {_SECONDS:.0f} s",
                "is the disk or the machine overloaded?",
            )
        finally:
            process.kill()
    try:
        return msgspec.json.decode(out, type=TorchBuild)
    except msgspec.MsgspecError:
        stated = err.decode("utf-8", "replace").strip().splitlines()
        last = (stated or [f"exit code {process.returncode}"])[-1]
        return Finding("torch", "bad", f"does not load: {last[:200]}", "pip install --force-reinstall torch")


def _gpus(torch: TorchBuild) -> Finding:
    if torch.gpus:
        listed = ", ".join(f"{name} {memory / 2**30:.0f} GiB (sm {cap})" for name, memory, cap in torch.gpus)
        return Finding("GPUs", "ok", listed)
    if torch.built_for_cuda:
        return Finding(
            "GPUs", "note", "none: torch is built for CUDA but sees no device", "ranks run on the CPU"
        )
    return Finding("GPUs", "note", "none: this torch is built for the CPU", "ranks run on the CPU")


def _collectives(torch: TorchBuild) -> Finding:
    if not torch.gloo:
        return Finding(
            "collectives", "bad", "no gloo in this torch", "install a build of torch with distributed"
        )
    count = len(torch.gpus)
    if not torch.nccl:
        level: Level = "note" if count > 1 else "ok"
        return Finding("collectives", level, "gloo (no nccl: ranks on GPUs would talk through the host)")
    fits = (
        f"nccl up to --tp {count} on GPUs, gloo beyond and on the CPU"
        if count
        else "gloo; nccl has no GPU to use"
    )
    return Finding("collectives", "ok", fits)


def _ranks() -> Finding:
    """The real thing: two ranks that must find each other."""
    started = time.monotonic()
    try:
        config = EngineConfig(tp=2, timeout_seconds=_SECONDS, start_timeout_seconds=_SECONDS)
        with Client(config, program="lockstep.engine.ranks") as client:
            client.call(Ping())
            backend = client.backend
    except EngineError as error:
        return Finding("ranks", "bad", f"two ranks do not meet: {error}", "is the loopback interface up?")
    return Finding("ranks", "ok", f"two met over {backend} in {time.monotonic() - started:.1f} s")
