"""Whatever numbers a recording holds, the diagnosis comes to an answer, and reports on the tap that holds them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from lockstep.engine.config import EngineConfig
from lockstep.sessions import Session, SessionWriter, StepRecord, TensorRecord
from lockstep.workbench.checking.forced_run import ForcedRun, record_reference
from lockstep.workbench.diagnosis.diagnose import diagnose
from lockstep.workbench.diagnosis.operations.facts import Facts
from lockstep.workbench.inferior.inferior import Inferior
from lockstep.workbench.models.capture import FULL
from lockstep.workbench.models.opening import open_model
from lockstep.workbench.models.requests import plan
from tests.checkpoints import tiny_checkpoint

PROMPTS, STEPS = [[3, 14, 15, 9, 26, 5], [35, 8]], 1


def _one(x: np.ndarray, value: float) -> np.ndarray:
    x = x.copy()
    x.flat[x.size // 2] = value
    return x


DAMAGES: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "all nan": lambda x: np.full_like(x, np.nan),
    "one nan": lambda x: _one(x, np.nan),
    "all inf": lambda x: np.full_like(x, np.inf),
    "one -inf": lambda x: _one(x, -np.inf),
    "zeros": np.zeros_like,
    "huge": lambda x: x * np.float32(1e30),
    "tiny": lambda x: x * np.float32(1e-35),
    "same": np.ones_like,
}
TAPS = ("attn_norm", "attn.q_proj", "attn.k_rope", "attn.v_cache", "attn.scores", "attn.probs", "attn.context",
        "attn.o_proj.partial", "attn.o_proj", "attn_residual", "mlp.act", "mlp.down", "mlp_residual")  # fmt: skip
PLACES = ["embed", *(f"layers.1.{tap}" for tap in TAPS), "final_norm", "logits"]
#: What broke most fits, and where fits are of different kinds: in the quick suite.
QUICK = {
    ("one nan", tap)
    for tap in ("embed", "layers.1.attn.k_rope", "layers.1.attn.probs", "layers.1.mlp.act", "logits")
}


@dataclass(frozen=True)
class Recorded:
    session: Session
    facts: Facts


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Recorded]:
    """A right run of a tiny model on two ranks."""
    root = tmp_path_factory.mktemp("numbers")
    model = open_model(str(tiny_checkpoint(root / "model", "qwen2")))
    reference = record_reference(model.path, PROMPTS, STEPS, "float32")
    config = plan(model, EngineConfig(tp=2), PROMPTS, STEPS + 1, FULL)
    with Inferior(model.path, model.config, config, capture=FULL) as inferior:
        run = ForcedRun(inferior, reference, root / "right.session", {})
        run.record(run.path)
    with Session.open(run.path) as session:
        yield Recorded(session, Facts.of(model.path, "float32"))


def _with(right: Session, path: Path, tap: str, damage: Callable[[np.ndarray], np.ndarray]) -> Session:
    """A copy of the session in which `tap` holds other numbers on each rank, at each step."""
    with SessionWriter.create(path, taps=list(right.taps), ranks=right.ranks, meta=right.meta) as writer:
        for step in right.steps():
            known = right.step(step)
            tensors = [
                TensorRecord(
                    one.name,
                    rank,
                    sequence.seq,
                    damage(part.array) if one.name == tap else part.array,
                    part.dtype,
                )
                for one in right.taps
                for sequence in known.sequences
                for rank, part in right.parts(one.name, step=step, seq=sequence.seq).items()
            ]
            writer.step(0, StepRecord(step, known.phase, known.sequences, 0.0, tensors=tensors))
    return Session.open(path)


@pytest.mark.parametrize(
    ("name", "tap"),
    [
        pytest.param(name, tap, marks=[] if (name, tap) in QUICK else pytest.mark.slow)
        for name in DAMAGES
        for tap in PLACES
    ],
)
@pytest.mark.sampled(6)
def test_any_numbers_have_an_answer(recorded: Recorded, tmp_path: Path, name: str, tap: str) -> None:
    with _with(recorded.session, tmp_path / "odd.session", tap, DAMAGES[name]) as session:
        found = diagnose(session, recorded.facts)
    assert tap in {*(one.tap for one in found.wrong), *found.harmless} or tap in "".join(found.notes)


def test_the_right_run_is_accused_of_nothing(recorded: Recorded) -> None:
    found = diagnose(recorded.session, recorded.facts)
    assert (found.causes, found.notes) == ((), ())
