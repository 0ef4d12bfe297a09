"""Packages of somebody else's, installed as far as Python can see: for tests of what they add."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def installed(
    folder: Path, name: str, files: Mapping[str, str], entries: Mapping[str, Mapping[str, str]]
) -> Iterator[None]:
    """A distribution NAME 1.0 in a folder of its own, on the path. `files` are its modules by path, `entries` its entry
    points by group."""
    site, module = folder / f"site-{name}", name.replace("-", "_")
    for file, text in files.items():
        (site / module / file).parent.mkdir(parents=True, exist_ok=True)
        (site / module / file).write_text(text)
    about = site / f"{module}-1.0.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    lines = [
        f"[{group}]\n" + "".join(f"{k} = {v}\n" for k, v in points.items())
        for group, points in entries.items()
    ]
    (about / "entry_points.txt").write_text("\n".join(lines))
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(site))
        try:
            yield
        finally:
            sys.modules.pop(module, None)
