"""Formats of dumps that other packages read, by the entry points `lockstep.readers`: docs/extending.md."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from lockstep.engine.extras import MissingExtra
from lockstep.workbench.extensions import Extension, extensions
from lockstep.workbench.foreign.importing import FORMATS, existing
from lockstep.workbench.foreign.passes import ForeignDumpError, ForeignFacts, ForeignPass, ForeignRun

#: Formats whose reader is a package of its own, and its name.
ELSEWHERE = {"msprobe": "lockstep-msprobe"}


def format_names() -> list[str]:
    """What `lockstep import` reads on this machine."""
    return [*FORMATS, *extensions("lockstep.readers", FORMATS)]


def open_dump(form: str, folder: Path, model: Path | None) -> ForeignRun:
    """Open a dump of a format, ours or one that a package adds; `model` is the checkpoint it is of, if that is known.

    KeyError for a format that nobody reads, MissingExtra where the package that does is known. ForeignDumpError where
    the folder is no such dump, ExtensionError where the package does not do as a reader has to.
    """
    if form in FORMATS:
        return FORMATS[form].open(folder, model)
    added = extensions("lockstep.readers", FORMATS).get(form)
    if added is None and form in ELSEWHERE:
        package = ELSEWHERE[form]
        raise MissingExtra(f"importing {form} needs a package of its own: pip install {package}")
    if added is None:
        raise KeyError(form)
    opening = added.load()
    with added.answering("its reader failed", ForeignDumpError, OSError):
        run = opening(existing(folder, form), model)
        return AddedRun.of(run, added)


@dataclass(frozen=True, slots=True)
class AddedRun:
    """A run as a package's reader gives it: what it is not as it should be is reported when it is met."""

    folder: Path
    _run: ForeignRun
    _by: Extension

    @classmethod
    def of(cls, run: object, by: Extension) -> AddedRun:
        """ExtensionError where `run` is none."""
        lacking = [name for name in ("folder", "facts", "passes") if not hasattr(run, name)]
        if lacking:
            raise by.error(f"its reader gave {type(run).__name__}, which is no ForeignRun: no {lacking[0]}")
        given = cast(ForeignRun, run)  # as far as can be seen from here
        return cls(Path(given.folder), given, by)

    @property
    def facts(self) -> ForeignFacts:
        with self._by.answering("its reader failed", ForeignDumpError, OSError):
            facts: object = self._run.facts
            if not isinstance(facts, ForeignFacts):
                raise self._by.error(f"its facts are {type(facts).__name__}, not ForeignFacts")
            return facts

    def passes(self, rank: int) -> Iterator[ForeignPass]:
        """Those of the reader, each looked at."""
        with self._by.answering("its reader failed", ForeignDumpError, OSError):
            for one in self._run.passes(rank):
                if not isinstance(one, ForeignPass) or one.rank != rank:
                    raise self._by.error(
                        f"its passes of rank {rank} hold {type(one).__name__}, not ForeignPass of it"
                    )
                yield one
