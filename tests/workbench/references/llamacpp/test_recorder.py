"""llama.cpp's recordings against transformers in float64, every tap of every step."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from lockstep.sessions import Session
from lockstep.workbench.references import transformers_recorder
from lockstep.workbench.references.golden import forced_onto
from lockstep.workbench.references.llamacpp import library
from lockstep.workbench.references.llamacpp.recorder import record
from lockstep.workbench.references.request import GoldenRequest, GoldenSequence, ReferenceFailure
from tests.checkpoints import tiny_variant
from tests.gguf_twins import gguf_twin

pytestmark = pytest.mark.llamacpp
needs_llamacpp = pytest.mark.skipif(not library.is_installed(), reason=library.INSTALL)

PROMPTS = (GoldenSequence(tuple(range(3, 17))), GoldenSequence((9, 4)))
STEPS = 2
STORIES = Path(__file__).parents[5] / "shared/data/stories260K/stories260K.gguf"


def twin(root: Path, variant: str, kind: str = "F32") -> Path:
    """The tiny model as a GGUF file without a tokenizer."""
    keys = {"tokenizer.ggml.model": "none"}
    return gguf_twin(tiny_variant(root, variant), root / "tiny.gguf", kind, keys=keys)


def errors(session: Session, truth: Session) -> dict[str, float]:
    """Tap -> its largest relative L2 error over the steps and sequences; shapes and infinities are equal."""
    worst: dict[str, float] = {}
    for tap in session.taps:
        if tap.name in session.meta.absent:
            continue
        for step in session.steps():
            for reported in session.step(step).sequences:
                ours = session.rebuilt(tap.name, step=step, seq=reported.seq).array
                right = truth.rebuilt(tap.name, step=step, seq=reported.seq).array
                assert ours is not None
                assert right is not None
                assert ours.shape == right.shape, tap.name
                finite = np.isfinite(right)
                assert (np.isfinite(ours) == finite).all(), tap.name
                a, b = ours[finite].astype(np.float64), right[finite].astype(np.float64)
                error = float(np.linalg.norm(a - b) / max(np.linalg.norm(b), 1e-30))
                worst[tap.name] = max(worst.get(tap.name, 0.0), error)
    return worst


def both(root: Path, file: Path, dequantised: bool = True) -> tuple[Session, Session]:
    """The session of llama.cpp, and that of transformers in float64 on the tokens that came out."""
    torch.set_num_threads(1)
    request = GoldenRequest(
        str(file), PROMPTS, STEPS, "float32", reference="llama.cpp", dequantised=dequantised
    )
    record(request, root / "llama.session", checkpoint="digest")
    forced = forced_onto(root / "llama.session")
    transformers_recorder.record(GoldenRequest(str(file), forced, STEPS, "float64"), root / "truth.session")
    return Session.open(root / "llama.session"), Session.open(root / "truth.session")


@needs_llamacpp
@pytest.mark.parametrize("variant", ["llama-llama3", "llama-linear", "llama-bias", "qwen2-tied", "qwen3"])
def test_every_tap_is_that_of_transformers(variant: str, tmp_path: Path) -> None:
    file = twin(tmp_path, variant)
    session, truth = both(tmp_path, file)
    found = errors(session, truth)
    assert set(session.meta.absent) | set(found) == {tap.name for tap in session.taps}
    assert {name.split(".", 2)[2] for name in session.meta.absent} == {
        "attn.o_proj.partial",
        "mlp.down.partial",
    }
    assert max(found.values()) < 1e-5, max(found, key=found.__getitem__)
    assert session.meta.source == "llama.cpp"
    assert session.meta.versions["llama-cpp-python"]
    assert session.meta.model.checkpoint == "digest"
    assert list(tmp_path.glob("*.gguf")) == [file]  # the dequantised file is gone


@needs_llamacpp
def test_a_split_model_is_recorded_as_a_whole(tmp_path: Path) -> None:
    keys = {"tokenizer.ggml.model": "none"}
    gguf_twin(tiny_variant(tmp_path, "llama"), tmp_path / "tiny", "Q8_0", keys=keys, split_tensors=10)
    first, *others = sorted(tmp_path.glob("tiny-*.gguf"))
    assert others
    assert max(errors(*both(tmp_path, first)).values()) < 1e-5


@needs_llamacpp
def test_stored_blocks_round_activations_and_dequantised_ones_do_not(tmp_path: Path) -> None:
    """The quantisation loss of llama.cpp's own arithmetic is in the one, and not in the other."""
    file = twin(tmp_path, "llama", "Q8_0")
    (tmp_path / "exact").mkdir()
    (tmp_path / "stored").mkdir()
    exact = errors(*both(tmp_path / "exact", file))
    stored = errors(*both(tmp_path / "stored", file, dequantised=False))
    assert max(exact.values()) < 1e-5
    assert stored["layers.0.attn_norm"] < 1e-5  # no matrix so far
    assert 1e-4 < stored["layers.0.attn.q_proj"] < 3e-2
    assert 1e-4 < stored["logits"] < 1e-1


@needs_llamacpp
@pytest.mark.skipif(not STORIES.exists(), reason="the shared data is not here")
def test_the_known_tokens_of_stories260k(tmp_path: Path) -> None:
    prompt = GoldenSequence((1, 403, 407, 261, 378))
    request = GoldenRequest(str(STORIES), (prompt,), 29, "float32", reference="llama.cpp")
    record(request, tmp_path / "a.session")
    with Session.open(tmp_path / "a.session") as session:
        emitted = [session.step(step).sequences[0].emitted for step in session.steps()]
    assert emitted == [
        432, 383, 286, 261, 376, 298, 315, 421, 395, 317, 426, 338, 401, 396, 267, 337, 410, 408, 419, 292,
        411, 322, 265, 282, 295, 433, 426, 385, 328, 432,
    ]  # fmt: skip


@needs_llamacpp
def test_refusals_are_one_line(tmp_path: Path) -> None:
    file = twin(tmp_path, "llama")
    request = GoldenRequest(str(file), (GoldenSequence((131,)),), 1, "float32", reference="llama.cpp")
    with pytest.raises(ReferenceFailure, match="token id 131 is outside the vocabulary of 131"):
        record(request, tmp_path / "a.session")
    double = GoldenRequest(str(file), PROMPTS, 1, "float64", reference="llama.cpp")
    with pytest.raises(ReferenceFailure, match="records in float32 on the cpu, not float64"):
        record(double, tmp_path / "a.session")
    file.write_bytes(file.read_bytes()[:-1])
    short = GoldenRequest(str(file), PROMPTS, 1, "float32", reference="llama.cpp", dequantised=False)
    with pytest.raises(ReferenceFailure, match=r"llama\.cpp cannot load it; its last output: "):
        record(short, tmp_path / "a.session")


def test_without_the_library_one_line_reports_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "is_installed", lambda: False)
    with pytest.raises(
        ReferenceFailure, match=r"^llama\.cpp is not installed: pip install 'lockstep-llm\[llamacpp\]'"
    ):
        library.need_installed()
