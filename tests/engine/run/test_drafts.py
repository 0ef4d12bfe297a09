"""Drafts that are verified in one pass: those that are taken back leave nothing behind."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from lockstep.engine.errors import RequestError
from lockstep.engine.ranks.messages import DraftTokens, Rewind
from tests.checkpoints import FAMILY_VARIANTS, tiny_checkpoint
from tests.engine.harness import Engine

PROMPT = [3, 17, 99, 4, 64]


@pytest.mark.parametrize("model", ["gemma2", "qwen3-next"])
def test_what_follows_accepted_drafts_is_what_follows_them_token_by_token(
    model: str, engine_of: Callable[[int], Engine], tmp_path: Path
) -> None:
    """The first of two drafts is right, the second is wrong: a pass is kept in part, states of linear attention too."""
    family, overrides = FAMILY_VARIANTS[model]
    path, engine = tiny_checkpoint(tmp_path, family, **overrides), engine_of(1)
    engine.load(path)
    plain = [one.token() for one in engine.generate([PROMPT], 7)]
    engine.rules({})
    engine.add(PROMPT)
    assert engine.step().token() == plain[0]
    for at in (1, 3):  # tokens that are emitted; the last one has not been read
        engine.client.call(DraftTokens(0, [plain[at], (plain[at + 1] + 1) % 100]))
        engine.step()
        read = len(PROMPT) + at + 1
        engine.client.call(Rewind({0: (read, read, read)}, at + 1))
        engine.client.call(DraftTokens(0, [plain[at + 1]]))
    assert [engine.step().token() for _ in range(2)] == plain[5:]


def test_drafts_of_no_token_or_beyond_the_context_are_refused(
    engine_of: Callable[[int], Engine], variant: Callable[[str], Path]
) -> None:
    engine = engine_of(1)
    engine.load(variant("qwen2-tied"))
    engine.add(PROMPT)
    with pytest.raises(RequestError, match="100000"):
        engine.client.call(DraftTokens(0, [100_000]))
    with pytest.raises(RequestError, match="has no room for 100000 more tokens"):
        engine.client.call(DraftTokens(0, [1] * 100_000))
