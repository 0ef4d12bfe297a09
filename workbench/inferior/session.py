"""Recording an inferior: its session, with all that a replay needs to run it again from the start."""

from __future__ import annotations

import contextlib
import gc
from dataclasses import asdict
from pathlib import Path

from msgspec import convert
from msgspec.structs import replace

from lockstep.sessions import SessionError, SessionWriter
from lockstep.sessions.format import database, files
from lockstep.sessions.meta import CaptureMeta, ConfigMeta, ModelMeta, SamplingMeta, SequenceMeta, SessionMeta
from lockstep.sessions.recording_file import identity
from lockstep.workbench.inferior.identity import checkpoint_digest, versions
from lockstep.workbench.inferior.inferior import Inferior
from lockstep.workbench.inferior.step_record import taps_of
from lockstep.workbench.inferior.token_recorder import TokenRecorder
from lockstep.workbench.models.tokenizer import find_tokenizer
from lockstep.workbench.views.extent import last_steps

#: What this process records, and has recorded: a signal ends it anywhere. None: while the writer was made.
_WRITERS: dict[Path, SessionWriter | None] = {}


def create_session(
    inferior: Inferior, path: Path, known: SessionMeta | None = None, *, overwrite: bool = False
) -> SessionWriter:
    """Start a session at `path` and record the inferior's further passes to it. `known`: what its owner knows of the
    run and the inferior does not (`source`, the model's name, prompts)."""
    before = identity(path)
    try:
        _WRITERS[path] = writer = SessionWriter.create(
            path,
            taps=taps_of(inferior.specs),
            ranks=inferior.config.tp,
            meta=session_meta(inferior, known or SessionMeta()),
            overwrite=overwrite,
        )
    except BaseException:
        if identity(path) not in (None, before):  # it was put in place
            _WRITERS[path] = None
        raise
    for note in inferior.model.notes:
        writer.event(0, 0, "note", note)
    tokenizer = find_tokenizer(inferior.path)
    inferior.recorder.begin(writer, None if tokenizer is None else TokenRecorder(tokenizer.token))
    return writer


def fold_recordings() -> list[tuple[Path, int]]:
    """Close what this process still records. Returns the sessions that it leaves, and each one's last step."""
    for path, writer in _WRITERS.items():
        with contextlib.suppress(SessionError, *database.ERRORS):  # a full disk keeps the log beside the file
            if writer is not None:
                writer.close()
            if any(map(files.exists, files.companions(path))):
                gc.collect()  # what a signal has cut short may still have it open
                SessionWriter.reopen(path).close()
            elif writer is None and files.exists(path):  # it was made, with the mark that somebody records it
                database.mark_closed(path)
    return last_steps(list(_WRITERS))


def session_meta(inferior: Inferior, known: SessionMeta) -> SessionMeta:
    """`known`, with the model, configuration, rules, sequences and versions of a run."""
    model = replace(
        convert(asdict(inferior.model), ModelMeta),
        name=known.model.name,
        path=str(inferior.path),
        checkpoint=checkpoint_digest(inferior.path),
    )
    sequences = {
        seq: SequenceMeta(
            prompt_ids=tuple(state.ids[: state.prompt_length]),
            sampling=SamplingMeta(**asdict(state.sampling)),
        )
        for seq, state in inferior.sequences.items()
    }
    return replace(
        known,
        model=model,
        config=replace(convert(asdict(inferior.config), ConfigMeta), backend=inferior.client.backend),
        rules=dict(inferior.rules),
        capture=CaptureMeta(**asdict(inferior.capture)),
        sequences=sequences,
        versions=versions(),
    )
