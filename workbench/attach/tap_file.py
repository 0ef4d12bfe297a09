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
#: What stands behind the tape, each behind all that it imports.
BEHIND = (
    "linear",
    "mamba",
    "falcon_h1",
    "gemma4",
    "latent",
    "llama4",
    "indexer",
    "names",
    "calls",
    "wrappers",
    "megatron",
    "modules",
)
_IMPORT = re.compile(r"^from \.lockstep_(\w+) import (?:[^(\n]+|\([^()]+\))\n", re.ASCII | re.MULTILINE)


def tap_file() -> str:
    """lockstep_tap.py with lockstep_limits.py in it, and what hooks modules behind it: what one of them imports of
    another is there already."""
    tape = SOURCE.read_text(encoding="utf-8")
    assert _LIMITS in tape, "where its limits belong"
    there, parts = ["limits"], [tape.replace(_LIMITS, _body("lockstep_limits.py"))]
    for name in BEHIND:
        body = _body(f"lockstep_{name}.py").replace(_TAPE, "")
        missing = set(_IMPORT.findall(body)) - set(there)
        assert not missing, f"what {name} imports stands behind it: {missing}"
        parts.append(_IMPORT.sub("", body))
        there.append(name)
    whole = "\n\n".join(parts)
    assert ".lockstep_" not in whole, "an import that is no line of its own"
    return whole


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
