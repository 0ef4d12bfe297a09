"""Which files an agent may name: those under the roots that the user gave, the demo models and the gallery.

A name is resolved, links included, before it is compared with the roots. What a checkpoint's folder holds is resolved
as well: a link in it must not lead elsewhere.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path

from lockstep.sessions import Session
from lockstep.sessions.meta import ModelMeta
from lockstep.sessions.text import clean
from lockstep.workbench.demo import GGUF_DIR, MODEL_DIR
from lockstep.workbench.demo.checkpoints import DEMOS
from lockstep.workbench.exit_codes import UsageError
from lockstep.workbench.paths import GALLERY, find_session
from lockstep.workbench.settings import session_limits

#: Sessions that are listed, and files that are looked at to find them.
_LISTED, _LOOKED_AT = 200, 20_000


class Roots:
    """Directories and files that the user opened to agents; UsageError for one that does not exist."""

    def __init__(self, roots: Sequence[Path]) -> None:
        for root in roots:
            if not root.exists():
                raise UsageError(f"{clean(str(root))} does not exist: name directories or files")
        self._roots = tuple(root.resolve() for root in roots)

    def session(self, name: str) -> Path:
        """A session by its path, or `gallery/NAME`. UsageError where it is outside."""
        if name.startswith("gallery/"):
            found = find_session(name).resolve()
            if found.parent == GALLERY.resolve():
                return found
        return self._inside(name)

    def model(self, name: str) -> str:
        """A checkpoint: a demo model's name, or the path of what lies under the roots. A hub id is refused, since it
        may be fetched from a network."""
        if name in DEMOS:
            return name
        path = self._inside(name)
        for one in path.iterdir() if path.is_dir() else ():
            if not self._holds(one.resolve()):
                raise UsageError(f"{clean(name)}: {clean(one.name)} leads outside of what was opened")
        return str(path)

    def recording(self, name: str) -> Path:
        """A session that may be opened: the checkpoint that it names, whose tokenizer would be read, may be as well."""
        path = self.session(name)
        with Session.open(path, session_limits()) as session:
            self.check_named(session.meta.model)
        return path

    def check_named(self, model: ModelMeta) -> None:
        """UsageError where a recording, which a stranger may have written, names a checkpoint that is outside and is
        there."""
        for named in (model.path, model.name):
            path = os.path.abspath(named)
            known = named in ("", *DEMOS) or Path(path) == MODEL_DIR or Path(path).parent == GGUF_DIR
            if not known and (named == model.path or os.path.isabs(named)) and os.path.exists(path):
                self.model(path)

    def new_file(self, name: str) -> Path:
        """A file to be written, in an existing directory under the roots."""
        path = Path(name)
        parent = self._inside(str(path.parent))
        if path.name in ("", "..") or not parent.is_dir():
            raise UsageError(f"{clean(name)}: name a file in an existing directory")
        return parent / path.name

    def sessions(self) -> list[Path]:
        """The sessions under the roots, at most 200 of them."""
        return sorted(islice(filter(self._holds, map(Path.resolve, self._found())), _LISTED))

    def _found(self) -> Iterator[Path]:
        looked_at = 0
        for root in self._roots:
            if root.is_file() and root.suffix == ".session":
                yield root
            for folder, _, files in os.walk(root):
                looked_at += len(files)
                if looked_at > _LOOKED_AT:
                    return
                yield from (Path(folder, file) for file in files if file.endswith(".session"))

    def _inside(self, name: str) -> Path:
        """What a name means: a path as it stands, or relative to a root (the first that has it)."""
        path = Path(name)
        candidates = [path] if path.is_absolute() else [root / path for root in self._roots]
        candidates += [root for root in self._roots if root.name == name and root.is_file()]
        resolved = [one.resolve() for one in candidates]
        for one in resolved:
            if self._holds(one) and one.exists():
                return one
        if any(map(self._holds, resolved)):
            raise UsageError(f"{clean(name, limit=200)} does not exist")
        opened = ", ".join(clean(str(root)) for root in self._roots) or "nothing but the demo and the gallery"
        raise UsageError(
            f"{clean(name, limit=200)} is outside of what was opened ({opened}): "
            "the user can start `lockstep mcp ROOT …` with it"
        )

    def _holds(self, path: Path) -> bool:
        return any(path == root or path.is_relative_to(root) for root in self._roots)
