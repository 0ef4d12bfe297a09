"""What trainers put around modules: FSDP, DDP, torch.compile, activation checkpoints, PEFT."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

from torch import nn

#: Names under which a wrapper has the module that it calls.
WRAPPED = ("_fsdp_wrapped_module", "_orig_mod", "_checkpoint_wrapped_module", "module")


def plain_path(path: str) -> str:
    """A module's path as it is without wrappers."""
    return ".".join(word for word in path.split(".") if word not in WRAPPED)


def plain_modules(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Every part by its path without wrappers, a shared one under each of its paths; of a wrapper and what it wraps,
    what it wraps."""
    found = {plain_path(path): part for path, part in module.named_modules(remove_duplicate=False)}
    yield from found.items()


def unwrapped(module: nn.Module) -> nn.Module:
    """The model itself."""
    while inner := next((one for name in WRAPPED if (one := module._modules.get(name)) is not None), None):
        module = inner
    base = getattr(module, "get_base_model", None)  # PEFT's
    return unwrapped(base()) if callable(base) else module


def home_of(part: nn.Module, function: str) -> Any:
    """The Python module of a part's class that has a function: FSDP2 makes a class of its own of those it shards. None
    where there is none."""
    homes = (sys.modules.get(one.__module__) for one in type(part).__mro__)
    return next((home for home in homes if hasattr(home, function)), None)
