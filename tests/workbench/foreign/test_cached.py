"""Rows of a prefix cache are those that were computed for them: a run with the cache is the session of one without."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from lockstep.sessions import Session
from lockstep.workbench.attach.inside.lockstep_tap import Tape
from lockstep.workbench.foreign.readers.lockstep import LockstepDump
from lockstep.workbench.foreign.session import write_session
from lockstep.workbench.judgements.coverage import coverage
from lockstep.workbench.views.provenance.findings import cache_audit
from lockstep.workbench.views.provenance.ledger import Misuse
from tests.workbench.views.provenance.paged import PagedEngine, as_recorded

SIZE = 4


def served(
    prompts: list[list[int]], decoded: int, *, share: bool, blocks: int = 30, seed: int = 0
) -> PagedEngine:
    """Requests one after the other, each read in chunks, with the tokens of one row of decode at the end."""
    dice = random.Random(seed)
    made = PagedEngine(SIZE, list(range(1, 1 + blocks)), share=share)
    for number, prompt in enumerate(prompts):
        made.begin(number, prompt)
        one = made.requests[number]
        while one.computed < len(prompt):
            left = len(prompt) - one.computed
            count = min(dice.randint(2, 6), left)
            made.run({number: left if left - count == 1 else count})  # one row would be decode
        for more in range(decoded):
            one.tokens.append(50 + more)
            made.run({number: 1})
        made.end(number)
    return made


def recorded(folder: Path, made: PagedEngine, capture: str = "full") -> Session:
    """A session with a tap whose rows depend on the tokens up to theirs, as those of a model do."""
    read: dict[int, list[int]] = {}
    tape = Tape(folder / "dump", capture=capture, tensors="embed")
    for one in made.passes:
        tape.step(
            [row.token for row in one.rows],
            [row.position for row in one.rows],
            [f"request {row.request}" for row in one.rows],
        )
        tape.cache(as_recorded(one, SIZE))
        sums = []
        for row in one.rows:
            reported = read.setdefault(row.request, list(one.cached.get(row.request, ())))
            del reported[row.place :]
            reported.append(row.token)
            sums.append([float(sum(token * (at + 1) for at, token in enumerate(reported)))])
        tape.tap("embed", torch.tensor([[float(row.token)] for row in one.rows]), "replicate")
        tape.tap("layers.0.mlp_residual", torch.tensor(sums), "replicate")
    tape.close()
    write_session(LockstepDump.open(folder / "dump"), folder / "run.session", form="lockstep")
    return Session.open(folder / "run.session")


def rows(session: Session) -> dict[tuple[int, int, str], object]:
    """Everything that it has of its sequences, tables of the cache apart."""
    return {
        (step, key.seq, key.tap): session.rebuilt(key.tap, step=step, seq=key.seq).array.tolist()  # type: ignore[union-attr]
        for step in session.steps()
        for key in session.captured(step)
        if not key.tap.startswith("cache.")
    }


@pytest.mark.sampled(2)
@pytest.mark.parametrize("capture", ["full", "stats"])
@pytest.mark.parametrize("seed", range(6))
def test_a_run_with_the_cache_is_the_session_of_one_without(seed: int, capture: str, tmp_path: Path) -> None:
    dice = random.Random(seed)
    base = [dice.randrange(40) for _ in range(20)]
    prompts = [[*base[: dice.randrange(2, 20)], *(dice.randrange(40) for _ in range(4))] for _ in range(5)]
    found = []
    for share in (True, False):
        folder = tmp_path / str(share)
        folder.mkdir()
        with recorded(folder, served([base, *prompts], 2, share=share, seed=seed), capture) as session:
            foreign, audit = session.meta.foreign, cache_audit(session)
            assert foreign is not None
            assert audit is not None
            assert (audit.findings, foreign.unknown, foreign.dropped) == ((), 0, {})
            assert bool(foreign.shared) == share
            found.append((rows(session), session.meta.sequences))
    assert found[0] == found[1]


def test_blocks_that_were_given_on_are_computed_again(tmp_path: Path) -> None:
    """Few blocks: what a request finds in the cache was put there by the last that computed it."""
    prompts = [list(range(9)), list(range(20, 29)), list(range(9)), list(range(9))]
    with recorded(tmp_path, served(prompts, 1, share=True, blocks=4)) as session:
        audit = cache_audit(session)
        assert audit is not None
        assert not audit.findings
        assert session.meta.foreign.shared == 4 + 8  # type: ignore[union-attr]


def test_rows_of_other_tokens_are_left_out_and_reported(tmp_path: Path) -> None:
    """Two prefixes with one hash: the second request's rows before its own are nobody's."""
    first, second = list(range(10, 19)), [*range(10, 14), 50, *range(15, 19)]
    made = served([first], 0, share=True)
    made.begin(1, second)
    taken = made.requests[1]
    taken.blocks, taken.computed = [1, 2], 8
    made.free = [block for block in made.free if block > 2]
    made.run({1: 1})
    for name in ("run", "truth"):
        (tmp_path / name).mkdir()
    with recorded(tmp_path / "run", made) as session:
        foreign, audit = session.meta.foreign, cache_audit(session)
        assert foreign is not None
        assert audit is not None
        assert (foreign.shared, foreign.unknown) == (8, 4)
        assert [one.kind for one in audit.findings] == [Misuse.COLLISION]
        kept = session.capture("embed", step=0, rank=0, seq=1)
        assert kept is not None
        assert (kept.slice, kept.array.tolist()) == ("{0;1;2;3;8}", [[10.0], [11.0], [12.0], [13.0], [18.0]])
        with recorded(tmp_path / "truth", served([first, second], 0, share=False)) as truth:
            rests = coverage(session, truth)
    assert (rests.rows, rests.aligned, rests.shared, rests.misplaced) == (14, 14, 4, "")
    assert rests.lacking == "4 rows of the prefix cache were computed for other tokens"
