"""Which names the code of an engine's model reads. What else its configuration has, nobody reads."""

from __future__ import annotations

import dis
import re
import sys
from collections.abc import Iterator
from types import CodeType, ModuleType
from typing import Any

from torch import nn

#: Those of whose models all code that reads configurations is their own.
_LIBRARIES = ("transformers", "vllm", "sglang", "nanovllm")
#: What a key of a configuration looks like.
_KEY = re.compile(r"[a-z][a-z0-9_]{1,60}", re.ASCII)
#: A module that declares keys: it reads those alone that it loads.
_DECLARES = ".configuration_"
#: Where libraries have their models: another one reads its own keys.
_MODELS = ".models."


def names_read(module: nn.Module) -> set[str]:
    """Attributes and strings in all code of the model's Python modules, and of those of the same library that they
    import: every key that may be read is one of them. None of a model of no library, whose code may lie anywhere."""
    library = type(module).__module__.partition(".")[0]
    found: set[str] = set()
    if library not in _LIBRARIES:
        return found
    for one in _modules(module, library):
        code = _code_of(one)
        if code is not None:
            found.update(_loaded(code, strings=_DECLARES not in one.__name__))
    # Two names of one key, as transformers' configurations have them.
    other_names = getattr(getattr(module, "config", None), "attribute_map", None) or {}
    found.update(key for name, key in other_names.items() if name in found)
    return {name for name in found if _KEY.fullmatch(name)}


def _modules(module: nn.Module, library: str) -> Iterator[ModuleType]:
    """Those of the library that the classes of the model and of its configuration are of, and what these import."""
    parts: list[Any] = [*module.modules(), getattr(module, "config", None)]
    own = {base.__module__ for part in parts for base in type(part).__mro__}
    waiting, seen = set(own), set[str]()
    while waiting:
        name = waiting.pop()
        if name in seen or name.partition(".")[0] != library or name not in sys.modules:
            continue
        if _MODELS in name and name not in own:
            continue
        seen.add(name)
        one = sys.modules[name]
        yield one
        waiting.update(_home(value) for value in list(vars(one).values()))


def _home(value: object) -> str:
    """The Python module that something is, or is of."""
    name = value.__name__ if isinstance(value, ModuleType) else getattr(value, "__module__", "")
    return name if isinstance(name, str) else ""


def _code_of(module: ModuleType) -> CodeType | None:
    get = getattr(getattr(module, "__loader__", None), "get_code", None)
    try:
        return None if get is None else get(module.__name__)
    except (ImportError, SyntaxError):  # of a loader that has no code for it
        return None


def _loaded(code: CodeType, *, strings: bool) -> Iterator[str]:
    """The attributes that some code loads, not those that it declares or stores; and its strings."""
    for step in dis.get_instructions(code):
        if step.opname in ("LOAD_ATTR", "LOAD_METHOD"):
            yield str(step.argval)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _loaded(constant, strings=strings)
        for one in constant if isinstance(constant, tuple | frozenset) else (constant,):
            if strings and isinstance(one, str):
                yield one
