"""Recording a run for a user: where it may go, and what makes its session readable without the model (torch-free)."""

from __future__ import annotations

import os
from pathlib import Path

from sessions import Session, SessionError, SessionWriter
from workbench.tokens import Tokenizer


def may_write(path: Path) -> Path:
    """`path`, if a session may be written there: it is free, or holds a session (which is replaced).

    FileExistsError for any other file, so that a slip of the hand cannot cost a checkpoint.
    """
    if os.path.lexists(path):
        try:
            Session.open(path).close()
        except SessionError as error:
            raise FileExistsError(
                f"{path} exists and is not a session: choose another name ({error})"
            ) from error
    return path


def keep_token_texts(path: Path, tokenizer: Tokenizer | None) -> None:
    """Put the text of every token that a finished session mentions into it, so that a replay can show words
    where the model is not at hand."""
    if tokenizer is None:
        return
    with Session.open(path) as session:
        seen: set[int] = set()
        for branch in session.branches():
            for step in session.steps(branch.id):
                for told in session.step(step, branch.id).sequences:
                    seen.update(told.ids, told.topk_ids, () if told.emitted is None else (told.emitted,))
    texts = {str(token): text for token in sorted(seen) if (text := tokenizer.token(token)) is not None}
    with SessionWriter.reopen(path) as writer:
        writer.set_meta("token_texts", texts)
