"""The parts of an installation that not everybody needs, and the command that installs each (torch-free).

`pip install lockstep-llm` replays, compares, exports, imports dumps and draws the screens. What it takes to run a
model, to ask llama.cpp, to serve browsers or agents are extras of the same name.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec

from lockstep.engine.errors import EngineError

#: The name under which Lockstep is installed; it is imported as `lockstep`.
DISTRIBUTION = "lockstep-llm"

#: Extra -> the modules that it brings, each by the name that it is imported by.
EXTRAS: dict[str, tuple[str, ...]] = {
    "engine": ("torch", "transformers", "tokenizers", "gguf"),
    "llamacpp": ("llama_cpp",),
    "web": ("textual_serve", "aiohttp"),
    "mcp": ("mcp",),
}


class MissingExtra(EngineError):
    """What was asked for needs a part of Lockstep that is not installed; the message has the command."""


def install(extra: str) -> str:
    """The command that installs an extra."""
    return f"pip install '{DISTRIBUTION}[{extra}]'"


def is_installed(extra: str) -> bool:
    """Whether all modules of an extra are there; imports none of them."""
    return all(find_spec(module) is not None for module in EXTRAS[extra])


def need(extra: str, what: str) -> None:
    """Pass where an extra is installed. MissingExtra otherwise: `what` is what needs it ("running a model")."""
    missing = [module for module in EXTRAS[extra] if find_spec(module) is None]
    if missing:
        raise MissingExtra(_missing(what, extra, missing))


def explained(error: ModuleNotFoundError) -> str | None:
    """What to report of an import that failed because an extra is not installed; None for any other."""
    missing = (error.name or "").partition(".")[0]
    extra = next((extra for extra, modules in EXTRAS.items() if missing in modules), None)
    return None if extra is None else _missing("this", extra, [missing])


def _missing(what: str, extra: str, modules: Sequence[str]) -> str:
    return f"{what} needs the extra '{extra}' (no {', '.join(modules)} here): {install(extra)}"
