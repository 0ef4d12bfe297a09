"""An embedding cut by rows of the vocabulary whose ranks look up what they should not is named."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from lockstep.engine.parallel import shards
from lockstep.workbench.diagnosis.operations.site import Site
from tests.workbench.diagnosis.variants.made import MODEL, ROWS, drawn, made_site, names

RNG = np.random.default_rng(11)
TABLE = drawn(RNG, MODEL.vocab_size, MODEL.hidden_size)
TOKENS = tuple(replace(row, token=int(RNG.integers(MODEL.vocab_size))) for row in ROWS)
IDS = np.array([row.token for row in TOKENS])


def site(seen: np.ndarray, tp: int) -> Site:
    weights = {"model.embed_tokens.weight": TABLE}
    return made_site("embedding", "embed", {}, seen, weights=weights, rows=TOKENS, tp=tp)


def looked_up(ids: np.ndarray, rank: int, tp: int, *, masked: bool = True) -> np.ndarray:
    part = shards.vocab(MODEL.vocab_size, tp, rank)
    local = np.clip(ids - part.start, 0, part.stop - part.start - 1)
    rows = TABLE[part.start + local]
    return np.where(((ids >= part.start) & (ids < part.stop))[:, None] | (not masked), rows, 0)


@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize("alone", [False, True])
def test_ids_of_other_ranks_that_are_not_masked_are_named(tp: int, alone: bool) -> None:
    seen = sum(looked_up(IDS, rank, tp, masked=alone and rank != 1) for rank in range(tp))
    assert names(site(np.asarray(seen), tp)) == {"foreign_ids_not_masked"}


def test_a_rank_that_has_the_ids_of_the_token_before_is_named() -> None:
    before = {(row.seq, row.position + 1): row.token for row in TOKENS}
    late = np.array([before.get((row.seq, row.position), row.token) for row in TOKENS])
    seen = looked_up(IDS, 0, 2) + looked_up(late, 1, 2)
    assert "ids_of_a_rank_differ" in names(site(seen, 2))


def test_random_damage_is_not_blamed_on_the_vocabulary_s_parts() -> None:
    right = looked_up(IDS, 0, 2) + looked_up(IDS, 1, 2)
    for size in (1e-3, 1.0):
        assert names(site(right + size * RNG.normal(size=right.shape), 2)) == set()
