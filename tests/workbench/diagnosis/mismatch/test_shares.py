"""Shares of the gap are those that transformers itself has: of what is left where one of two mistakes is mended."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from lockstep.sessions import Session
from lockstep.sessions.limits import UNLIMITED
from lockstep.workbench.diagnosis.mismatch.gaps import gaps
from lockstep.workbench.diagnosis.mismatch.logprobs import raw_logprobs
from lockstep.workbench.diagnosis.mismatch.shares import GapShares, gap_shares
from lockstep.workbench.diagnosis.mismatch.side import Side
from lockstep.workbench.diagnosis.mismatch.tokens import paired_lines
from lockstep.workbench.diagnosis.operations.facts import Facts
from lockstep.workbench.diagnosis.row_sides import RowSide
from lockstep.workbench.diagnosis.search_time import SearchTime
from tests.checkpoints import FAMILY_VARIANTS
from tests.workbench.diagnosis.bugs import recording
from tests.workbench.diagnosis.bugs.bug import Bug, Place
from tests.workbench.diagnosis.bugs.patched import Patched
from tests.workbench.diagnosis.bugs.recording import Recordings


@pytest.fixture(scope="module")
def short(tmp_path_factory: pytest.TempPathFactory) -> Recordings:
    return Recordings(tmp_path_factory.mktemp("shares"), steps=2)


class BugOfOneModel(Bug):
    """Whatever it is called: all have the same weights and prompts."""

    @property
    def seed(self) -> int:
        return 0


def scaled(*factors: tuple[str, float]) -> Callable[[Patched], None]:
    """Modules of the decoder whose outputs are multiplied."""

    def patch(patched: Patched) -> None:
        for name, factor in factors:
            module = patched.model.model.get_submodule(name)
            module.register_forward_hook(lambda _module, _args, out, by=factor: out * by)

    return patch


def shares(
    short: Recordings, model: str, factors: Sequence[tuple[str, float]], tp: int = 1, seconds: float = 600.0
) -> GapShares:
    """Of a rollout with these mistakes and a trainer with none, three passes each."""
    name = f"scaled {sorted(factors)} {tp}"
    recorded = short.of(BugOfOneModel(name, "", (), "", Place(()), scaled(*factors), model, tp=tp))
    facts = Facts.of(recorded.checkpoint, "float32")
    with Session.open(recorded.engine, UNLIMITED) as first, Session.open(recorded.floor, UNLIMITED) as second:
        ours, theirs = (
            Side.of(name, RowSide(session), facts)
            for name, session in (("rollout", first), ("trainer", second))
        )
        logprobs = [{line.seq: raw_logprobs(side, line) for line in side.lines} for side in (ours, theirs)]
        found = gaps(paired_lines(ours.lines, theirs.lines), *logprobs)
        return gap_shares(ours, theirs, found, SearchTime(seconds))


@pytest.mark.parametrize("tp", [2, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.slow
def test_of_two_mistakes_each_has_what_goes_where_it_is_mended(short: Recordings, tp: int) -> None:
    """Within what a mistake of some per cent, which is kept as it was, would have followed its inputs."""
    first, second = ("layers.0.self_attn.o_proj", 1.02), ("layers.1.mlp.down_proj", 1.03)
    both = shares(short, "llama-bias", [first, second], tp)
    without_first, without_second = (
        shares(short, "llama-bias", [which], tp, seconds=0.0) for which in (second, first)
    )
    found = {one.tap: one for one in both.shares}
    for tap, left in (("layers.0.attn.o_proj", without_first), ("layers.1.mlp.down", without_second)):
        wanted = both.whole.gone(left.whole)
        assert 0.05 < wanted.kl < 0.95, "both take part"
        assert found[tap].rollout.gap == pytest.approx(wanted.gap, abs=1e-2)
        assert found[tap].rollout.kl == pytest.approx(wanted.kl, abs=1e-2)
    assert {one.tap for one in both.shares[:2]} == {"layers.0.attn.o_proj", "layers.1.mlp.down"}


@pytest.mark.slow
@pytest.mark.parametrize("model", ["qwen3-moe", "qwen3-next"])
def test_experts_are_chosen_anew(short: Recordings, model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A mistake in front of a router that moves tokens to other experts has the whole gap; so has a state's."""
    family, overrides = FAMILY_VARIANTS[model]
    monkeypatch.setitem(recording.MODELS, model, (family, overrides, lambda weights: None))
    name = "linear_attn.out_proj" if model == "qwen3-next" else "self_attn.o_proj"
    found = shares(short, model, [(f"layers.0.{name}", 1.02)]).shares
    mine = next(one for one in found if one.tap in ("layers.0.attn.o_proj", "layers.0.attn.out_proj"))
    assert min(mine.rollout.gap, mine.trainer.gap, mine.rollout.kl, mine.trainer.kl) > 0.99
    others = [one for one in found if one.tap != mine.tap and not one.tap.endswith("topk_ids")]
    assert all(abs(one.size) < 0.01 for one in others)
