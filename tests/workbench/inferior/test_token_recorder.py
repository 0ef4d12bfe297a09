"""A session keeps the texts of its tokens, page by page, and gives them back without a tokenizer."""

from __future__ import annotations

from pathlib import Path

from lockstep.sessions import Session, SessionMeta, SessionWriter
from lockstep.sessions.records import SequenceStep, StepRecord, Tap
from lockstep.workbench.inferior.token_recorder import TokenRecorder


def test_every_token_that_was_seen_has_its_text_in_the_file(tmp_path: Path) -> None:
    path = tmp_path / "texts.session"
    wanted = {token: f"t{token}\x1b" for token in range(1300) if token % 7}
    with SessionWriter.create(
        path, taps=[Tap(0, "embed", "replicate")], ranks=1, meta=SessionMeta()
    ) as writer:
        texts = TokenRecorder(wanted.get)
        for step in range(13):
            ids = range(step * 100, step * 100 + 90)
            reported = SequenceStep(
                0, list(ids[:50]), list(ids[:50]), [[1]], emitted=ids[50], topk_ids=list(ids[51:])
            )
            texts.note(StepRecord(step, "decode", [reported], 0.0))
            texts.flush(writer)
    seen = {token for step in range(13) for token in range(step * 100, step * 100 + 90)}
    assert Session.open(path).meta.token_texts == {t: wanted[t] for t in seen if t in wanted}
