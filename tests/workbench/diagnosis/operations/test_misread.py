"""Mistakes in reading a GGUF file, named from the session and the file."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from lockstep.engine.checkpoint.resolve import open_checkpoint
from lockstep.engine.config import EngineConfig
from lockstep.engine.faults.fault import Fault
from lockstep.engine.faults.quantisation import FAULTS
from lockstep.sessions import Session
from lockstep.workbench.diagnosis.diagnose import Explanation, diagnose
from lockstep.workbench.diagnosis.operations.facts import Facts
from lockstep.workbench.diagnosis.operations.weights import checkpoint_misreadings
from lockstep.workbench.inferior.inferior import Inferior
from lockstep.workbench.inferior.session import create_session
from lockstep.workbench.models.capture import FULL
from tests.checkpoints import tiny_checkpoint
from tests.gguf_twins import gguf_twin

PROMPT = [3, 130, 17, 99, 4, 64, 5, 12]

Run = Callable[..., Session]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A llama with biases, its matrices in Q4_1 (which packs nibbles and has offsets), q and k permuted."""
    directory = tmp_path_factory.mktemp("gguf")
    checkpoint = tiny_checkpoint(directory, "llama", attention_bias=True)
    return gguf_twin(checkpoint, directory / "model.gguf", "Q4_1")


@pytest.fixture(scope="module")
def run(path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    """`run(name, **rules)`: the session of two ranks under rules, forced onto the same tokens."""
    torch.set_num_threads(1)
    root = tmp_path_factory.mktemp("sessions")
    model, source = open_checkpoint(path)
    source.close()
    with Inferior(path, model, EngineConfig(tp=2, threads=1, max_tokens=64), capture=FULL) as inferior:
        inferior.add(PROMPT)

        def record(name: str, **rules: str) -> Session:
            inferior.set_rules(rules)
            target = root / f"{name}.session"
            with create_session(inferior, target, overwrite=True):
                inferior.step({0: 9})
            inferior.recorder.writer = None
            return Session.open(target)

        yield record


def explained(run: Run, path: Path, **rules: str) -> Explanation:
    return diagnose(run("engine", **rules), Facts.of(path, "float32"))


CAUSES = {
    # fault -> where it shows, the cause, its mistake and words of its text
    "integers-as-weights": ("embed", "misread", "integers", "without their scales"),
    "nibbles-swapped": ("embed", "misread", "swapped_nibbles", "low and the high half of each packed byte"),
    "scale-and-offset-swapped": ("embed", "misread", "swapped_scales", "scale and offset of its blocks"),
    "bias-bytes": (
        "layers.0.attn.q_proj",
        "misread",
        "bytes",
        "{q,k,v}_proj.bias is misread: its bytes are taken",
    ),
    "rows-not-restored": ("layers.0.attn.q_proj", "misread", "rows_stored", "left in llama.cpp's order"),
    "rows-reordered-again": ("layers.0.attn.q_proj", "misread", "rows_again", "applied to its rows again"),
    "k-rows-by-query-heads": (
        "layers.0.attn.k_proj",
        "misread",
        "rows_by_query_heads",
        "number of query heads",
    ),
    "transposed": ("layers.0.attn.q_proj", "transposed", None, "{q,k,v}_proj.weight is used transposed"),
}


@pytest.mark.sampled(8)
@pytest.mark.parametrize(
    "fault", [fault for fault in FAULTS if fault.id in CAUSES], ids=lambda fault: fault.id
)
def test_each_mistake_is_named(fault: Fault, path: Path, run: Run) -> None:
    tap, name, how, words = CAUSES[fault.id]
    causes = explained(run, path, **{fault.seam: fault.value}).causes
    assert (causes[0].tap, causes[0].name) == (tap, name)
    assert how is None or causes[0].transform["how"] == how
    assert words in causes[0].text
    assert not any(cause.alternative for cause in causes)


def test_an_untouched_engine_is_not_accused(path: Path, run: Run) -> None:
    found = explained(run, path)
    assert (found.wrong, found.unjudged, found.harmless) == ((), (), ())


def test_safetensors_have_no_misreadings(tmp_path: Path) -> None:
    assert checkpoint_misreadings(tiny_checkpoint(tmp_path, "llama"))("model.embed_tokens.weight") == []
