"""The one file that people copy into an engine of their own: the tape, and what hooks modules to it."""

from __future__ import annotations

import re
from pathlib import Path

NAME = "lockstep_tap.py"
#: The files that go along into an attached process.
INSIDE = Path(__file__).resolve().parent / "inside"
SOURCE = INSIDE / NAME
_FUTURE = "from __future__ import annotations\n"
_TAPE = "if TYPE_CHECKING:\n    from .lockstep_tap import Tape\n"


def tap_file() -> str:
    """lockstep_tap.py with lockstep_modules.py behind it."""
    tape, modules = (
        path.read_text(encoding="utf-8") for path in (SOURCE, SOURCE.with_name("lockstep_modules.py"))
    )
    about, _, body = modules.partition(_FUTURE)
    assert _TAPE in body, "what the joined file has already"
    title = "".join(f"# {line}".rstrip() + "\n" for line in about.strip().strip('"').splitlines())
    return f"{tape}\n\n{title}{body.replace(_TAPE, '')}"


def tap_version() -> tuple[str, int]:
    """The version of lockstep_tap.py, and of the dump that it writes."""
    text = SOURCE.read_text(encoding="utf-8")
    version = re.search(r'^__version__ = "([\d.]+)"$', text, re.MULTILINE)
    format_ = re.search(r"^FORMAT = (\d+)\b", text, re.MULTILINE)
    assert version is not None
    assert format_ is not None
    return version[1], int(format_[1])
