"""Loops that torch has no operator for, compiled by numba: how, and on how many threads they run.

A kernel is compiled when a machine uses it for the first time, which takes some seconds, and kept beside its module or
in the user's cache. numba itself takes half a second to import: whoever uses it decides whether the work is worth it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from importlib import import_module
from pathlib import Path
from types import ModuleType

import torch

#: What all kernels are compiled with. Sums may be taken in any order, which vectors need; infinities and NaN are what
#: they are.
OPTIONS: dict[str, bool | set[str]] = {
    "cache": True,
    "nogil": True,
    "fastmath": {"reassoc", "nsz", "contract"},
}

_SETTINGS = ".numba_config.yaml"


@cache
def kernels(module: str) -> ModuleType:
    """A module of kernels. Any exception: no numba, none for this Python, no folder for what it compiles."""
    config = _configuration()
    if config.DISABLE_JIT:
        raise RuntimeError("NUMBA_DISABLE_JIT is set")
    return import_module(module)


def _configuration() -> ModuleType:
    """numba's, without the file in the working directory that it reads when it is imported and whenever it compiles:
    such a file names modules that it imports and folders that it unpickles from. A program that has imported numba
    itself keeps what it reads."""
    if sys.modules.get("numba") is not None:
        return import_module("numba.core.config")
    if Path(_SETTINGS).exists():
        raise RuntimeError(f"numba would obey {_SETTINGS} in the working directory")
    import_module("numba")
    config = import_module("numba.core.config")
    config._config_fname = ""  # type: ignore[attr-defined]
    return config


def runs(count: int, least: int) -> list[slice]:
    """0 … count in equal runs, one a thread of torch's, of `least` at least."""
    size = max(1, least, -(-count // torch.get_num_threads()))
    return [slice(start, min(count, start + size)) for start in range(0, count, size)]


def on_threads(work: Callable[[int], None], count: int) -> None:
    """work(0) … work(count - 1) at once. It must leave the interpreter's lock, as kernels do."""
    others = [_pool(torch.get_num_threads()).submit(work, number) for number in range(1, count)]
    if count:
        work(0)
    for one in others:
        one.result()


@cache
def _pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, "lockstep-kernel")
