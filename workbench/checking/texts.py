"""Generated text against another library's, on the same prompt, with the same sampling: where the two part.

Up to there both have read the same tokens, so the other's logits are recorded on the engine's tokens, and the same
sampler, keyed by (seed, sequence, position), chooses from them: it chooses what a free run would have.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from lockstep.engine.config import DType
from lockstep.engine.run.sampling import Sampling
from lockstep.sessions import Session
from lockstep.sessions.limits import UNLIMITED
from lockstep.workbench.inferior.generation import Generated, Top
from lockstep.workbench.references.golden import Wanted, record_all
from lockstep.workbench.references.request import GoldenSequence, ReferenceName


@dataclass(frozen=True, slots=True)
class Parting:
    """The first token of a sequence that the other library would not have chosen. `step` counts from 0; the likeliest
    tokens of both, with their logits, best first."""

    seq: int
    step: int
    position: int
    engine_token: int
    reference_token: int
    engine_top: Top
    reference_top: Top


@dataclass(frozen=True, slots=True)
class TextComparison:
    """`tokens` were compared. `partings` holds one a sequence that parts."""

    reference: ReferenceName
    tokens: int
    partings: tuple[Parting, ...]


def compare_texts(
    model: Path,
    sequences: Mapping[int, Generated],
    sampling: Sampling,
    reference: ReferenceName,
    dtype: DType,
    *,
    progress: Callable[[int, int], None] | None = None,
    warn: Callable[[str], None] = lambda text: None,
) -> TextComparison:
    """Hold what the engine has generated against the reference: llama.cpp with the file's blocks as they are stored,
    transformers at the engine's `dtype`. ReferenceFailure states why that cannot be."""
    # Imported here: torch, which generating itself has only in the ranks.
    import torch

    from lockstep.engine.run.sampler import choose

    written = {seq: one for seq, one in sequences.items() if one.ids}
    if not written:
        return TextComparison(reference, 0, ())
    forced = [GoldenSequence(tuple(one.prompt_ids), tuple(one.ids)) for one in written.values()]
    steps = max(len(one.ids) for one in written.values()) - 1
    wanted = Wanted("float32", reference, dequantised=False) if reference == "llama.cpp" else Wanted(dtype)
    (recorded,) = record_all(model, forced, steps, [wanted], progress=progress, warn=warn)
    partings = []
    with Session.open(recorded, UNLIMITED) as session:
        for place, (seq, one) in enumerate(written.items()):
            for step, token in enumerate(one.ids):
                logits = session.rebuilt("logits", step=step, seq=place).array
                assert logits is not None, "a reference records every tensor"
                position = len(one.prompt_ids) + step
                theirs = choose(torch.from_numpy(logits[-1].copy()), sampling, seq, position)
                if theirs.token != token:
                    top = tuple(zip(theirs.top_ids, theirs.top_logits, strict=True))
                    partings.append(Parting(seq, step, position, token, theirs.token, one.top[step], top))
                    break
    return TextComparison(reference, sum(len(one.ids) for one in written.values()), tuple(partings))
