"""What other packages add by entry points: readers of dumps, doors into engines, exporters. docs/extending.md.

A package is searched for when one is asked for, or when they are listed, and imported when it is used. It never takes
the name of one of ours. What does not load, or is not what it should be, is an error that names the package.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Container, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from typing import Literal

from lockstep.engine.text import printable

Group = Literal["lockstep.readers", "lockstep.engines", "lockstep.exporters"]

_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,39}", re.ASCII)


class ExtensionError(Exception):
    """What another package adds cannot be used: the message names the package, and what is wrong with it."""


@dataclass(frozen=True, slots=True)
class Extension:
    """Something that a package adds under a name, not imported yet."""

    group: Group
    name: str
    package: str  # with its version
    _point: EntryPoint

    def load(self) -> Callable[..., object]:
        """What the entry point names. ExtensionError where it cannot be imported, or cannot be called."""
        with self.answering("cannot be imported"):
            found = self._point.load()
        if not callable(found):
            raise self.error(f"{self._point.value} is no function")
        called: Callable[..., object] = found
        return called

    @contextmanager
    def answering(self, what: str, *expected: type[Exception]) -> Iterator[None]:
        """While the package's code runs: what it raises, other than errors that are `expected`, is the package's."""
        ours: tuple[type[Exception], ...] = (ExtensionError, *expected)
        try:
            yield
        except ours:
            raise
        except Exception as error:
            raise self.error(f"{what}: {type(error).__name__}: {printable(error, 300)}") from error

    def error(self, wrong: str) -> ExtensionError:
        """The error that names the package."""
        return ExtensionError(f"{self.package} adds {self.name!r} to {self.group}, and {wrong}")


def extensions(group: Group, ours: Container[str] = ()) -> dict[str, Extension]:
    """What there is under names that are not `ours`, by name. Of two packages with the same name neither is used."""
    found: dict[str, Extension] = {}
    twice = set()
    for point in entry_points(group=group):
        if point.name in ours or _NAME.fullmatch(point.name) is None:
            continue
        one = Extension(group, point.name, _package(point), point)
        if point.name in found and found[point.name].package != one.package:
            twice.add(point.name)
        found.setdefault(point.name, one)
    return {name: one for name, one in sorted(found.items()) if name not in twice}


def _package(point: EntryPoint) -> str:
    return "a package" if point.dist is None else printable(f"{point.dist.name} {point.dist.version}", 100)
