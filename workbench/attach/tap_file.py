"""The one file that people copy into an engine of their own: the tape, its limits, and what hooks modules to it."""

from __future__ import annotations

import re
from pathlib import Path

NAME = "lockstep_tap.py"
#: The files that go along into an attached process.
INSIDE = Path(__file__).absolute().parent / "inside"
SOURCE = INSIDE / NAME
_FUTURE = "from __future__ import annotations\n"
_TAPE = "if TYPE_CHECKING:\n    from .lockstep_tap import Tape\n"
_LIMITS = "from .lockstep_limits import TapeLimits, alone, refuse_capture\n"
_CAPTURE = "from .lockstep_limits import refuse_capture\n"
_CALLS = "from .lockstep_calls import CallInputs\n"
_LINEAR = "from .lockstep_linear import GATED, TAKE, functions_of, shown_call\n"
_GEMMA4 = "from .lockstep_gemma4 import GEMMA4_TAKE, gemma4_names, more_of, rotated_calls\n"
_LATENT = "from .lockstep_latent import LATENT, LATENT_TAKE, OF_CACHED, new_rows\n"
_LINEAR_NAMES = "from .lockstep_linear import LINEAR\n"
_NAMES = (
    "from .lockstep_names import "
    "BEHIND, FUSED, HEADS_FIRST, IN_PART, OVER_ALL_HEADS, TRANSFORMERS, TURNED, Names\n"
)


def tap_file() -> str:
    """lockstep_tap.py with lockstep_limits.py in it, lockstep_linear, _gemma4, _latent, _names, _calls and _modules.py
    behind it."""
    tape = SOURCE.read_text(encoding="utf-8")
    limits, linear, gemma4, latent, names, calls, modules = (
        _body(f"lockstep_{name}.py")
        for name in ("limits", "linear", "gemma4", "latent", "names", "calls", "modules")
    )
    assert _TAPE in modules, "what the joined file has already"
    assert _TAPE in linear, "as well"
    assert _LINEAR in modules, "which stands before it there"
    assert _GEMMA4 in modules, "as this does"
    assert _LATENT in modules, "as this does"
    assert _NAMES in modules, "as this does"
    assert _LINEAR_NAMES in names, "after that"
    assert _CALLS in modules, "as this does"
    assert _CAPTURE in modules, "which is in the limits"
    assert _LIMITS in tape, "where its limits belong"
    for line in (_CAPTURE, _LINEAR, _GEMMA4, _LATENT, _NAMES, _CALLS):
        modules = modules.replace(line, "")
    names = names.replace(_LINEAR_NAMES, "")
    behind = f"{linear}\n\n{gemma4}\n\n{latent}\n\n{names}\n\n{calls}\n\n{modules}".replace(_TAPE, "")
    return f"{tape.replace(_LIMITS, limits)}\n\n{behind}"


def _body(name: str) -> str:
    """A file of ours to go into another: what it is about as a comment, without its first import."""
    about, _, body = SOURCE.with_name(name).read_text(encoding="utf-8").partition(_FUTURE)
    return "".join(f"# {line}".rstrip() + "\n" for line in about.strip().strip('"').splitlines()) + body


def tap_version() -> tuple[str, int]:
    """The version of lockstep_tap.py, and of the dump that it writes."""
    text = SOURCE.read_text(encoding="utf-8")
    version = re.search(r'^__version__ = "([\d.]+)"$', text, re.MULTILINE)
    format_ = re.search(r"^FORMAT = (\d+)\b", text, re.MULTILINE)
    assert version is not None
    assert format_ is not None
    return version[1], int(format_[1])
