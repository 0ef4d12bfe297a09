"""What a run was too short for: windows, original contexts and chunks that none of its sequences went beyond."""

from __future__ import annotations

from lockstep.engine.config import ModelConfig
from lockstep.engine.config.thresholds import thresholds
from lockstep.sessions import Session
from lockstep.workbench.words.plain_text import plural


def not_reached(session: Session, model: ModelConfig, branch: int = 0) -> list[str]:
    """A sentence for all that the tokens of the branch did not go beyond; none where nothing is left."""
    read: dict[int, int] = {}
    for step in session.steps(branch):
        for one in session.step(step, branch).sequences:
            read[one.seq] = read.get(one.seq, 0) + len(one.ids)
    longest = max(read.values(), default=0)
    left = [one for one in thresholds(model, session.meta.config.chunk_tokens) if one.tokens >= longest]
    if not left or not longest:
        return []
    named = " and ".join(one.what for one in left)
    return [
        f"with {plural(longest, 'token')} {named} {'is' if len(left) == 1 else 'are'} not reached: a longer prompt "
        f"shows whether what is beyond is right (`check --prompt-tokens {left[-1].tokens + 1}` makes one up)"
    ]
