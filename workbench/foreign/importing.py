"""From a folder of somebody's dump to a session file: all of it, or none."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Required, TypedDict, Unpack

from lockstep.engine.scratch import ScratchFolder, deliver
from lockstep.sessions import SessionWriteError
from lockstep.sessions.errors import SessionBusy
from lockstep.sessions.lock import WriterLock
from lockstep.sessions.meta import ForeignMeta, ModelMeta, SessionMeta
from lockstep.sessions.recording_file import put_in_place
from lockstep.workbench.foreign.passes import Counted, ForeignDumpError, ForeignRun, TokenText
from lockstep.workbench.words.plain_text import plural


@dataclass(frozen=True, slots=True)
class DumpFormat:
    """A format: who writes it, and where its reader is: `function(folder, model)` of a module, imported when it is
    asked for."""

    writer: str
    module: str
    function: str

    def open(self, folder: Path, model: Path | None) -> ForeignRun:
        """Open a dump of this format; `model` is the checkpoint it is of, if that is known. ForeignDumpError where it
        is none."""
        run: ForeignRun = getattr(import_module(self.module), self.function)(
            existing(folder, self.writer), model
        )
        return run


def existing(folder: Path, writer: str) -> Path:
    """The folder. ForeignDumpError where there is none."""
    if not folder.is_dir():
        raise ForeignDumpError(f"{folder}: no such folder; give the one that {writer} wrote")
    return folder


_READERS = "lockstep.workbench.foreign.readers."

#: The formats by the name that `lockstep import` knows; what they are recognised by is in `models.dumps`.
FORMATS: dict[str, DumpFormat] = {
    "lockstep": DumpFormat("lockstep_tap.py", _READERS + "lockstep", "open_lockstep"),
    "sglang": DumpFormat("--debug-tensor-dump-output-folder", _READERS + "sglang", "open_sglang"),
    "sglang-dumper": DumpFormat("SGLang's dumper.py", _READERS + "sglang_dumper", "open_sglang_dumper"),
    "llamacpp": DumpFormat("llama-debug, or a cb_eval callback,", _READERS + "llamacpp", "open_llamacpp"),
    "transformers": DumpFormat(
        "model_addition_debugger_context", _READERS + "transformers", "open_transformers"
    ),
}


class ImportOptions(TypedDict, total=False):
    """What `write_session` is given beside the run."""

    form: Required[str]
    model: ModelMeta | None
    token: TokenText
    progress: Counted


def import_run(run: ForeignRun, path: Path, **options: Unpack[ImportOptions]) -> SessionMeta:
    """Write `run` as a session at `path`, in place of one that is there: what is in it. A run that cannot be imported
    leaves what was there. ForeignDumpError, SessionWriteError, SessionBusy; and see `write_session`."""
    from lockstep.workbench.foreign.session import (
        write_session,
    )  # statistics are torch's, which help need not wait for

    try:
        with WriterLock.take(path), ScratchFolder.make("import", path.absolute().parent) as folder:
            fresh = folder.path / "run.session"
            meta = write_session(run, fresh, **options)
            put_in_place(fresh, path, deliver)
            return meta
    except SessionBusy:
        raise
    except (OSError, SessionWriteError) as error:
        why = getattr(error, "strerror", None) or error.__cause__ or error
        raise SessionWriteError(
            f"cannot write a session to {path}: {why}. Nothing of it is left; make room, or choose another directory."
        ) from error


def dropped_lines(foreign: ForeignMeta) -> Sequence[str]:
    """What of a dump is not in its session, a line each."""
    lines = [f"dropped {count} {what}" for what, count in foreign.dropped.items()]
    if foreign.unknown:
        lines.append(
            f"left out {plural(foreign.unknown, 'row')} of the prefix cache, computed for other tokens"
        )
    lines += [
        f"rank {rank} went on alone, passes that are left out: {count}" for rank, count in foreign.cut.items()
    ]
    return [*lines, *(f"left out {one}" for one in foreign.lost)]
