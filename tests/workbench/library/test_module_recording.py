"""`lockstep.record`: a model in this process, recorded, and afterwards as it was."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, DataCollatorWithFlattening

import lockstep
from lockstep.sessions import Session
from lockstep.workbench.diagnosis.diagnose import diagnose
from lockstep.workbench.diagnosis.operations.facts import Facts
from tests.checkpoints import tiny_checkpoint
from tests.workbench.library.safe_html import Shown


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("module"), "qwen2", num_hidden_layers=2)


@pytest.fixture(scope="module")
def module(checkpoint: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()


def state(module: Any) -> list[object]:
    """All that a tap could leave behind."""
    import transformers.models.qwen2.modeling_qwen2 as home

    hooks = [
        (name, *map(list, (part._forward_hooks, part._forward_pre_hooks)))
        for name, part in module.named_modules()
    ]
    return [*hooks, home.apply_rotary_pos_emb, sorted(vars(module))]


def test_every_call_inside_the_block_is_recorded(
    module: Any, checkpoint: Path, tmp_path: Path, capfd: Any
) -> None:
    before, prompt = state(module), torch.tensor([[5, 6, 7]])
    alone = module.generate(prompt, max_new_tokens=3, do_sample=False)
    with lockstep.record(module, tmp_path / "run.session", model=checkpoint) as recording:
        assert recording.session is None
        assert torch.equal(module.generate(prompt, max_new_tokens=3, do_sample=False), alone)
    assert state(module) == before
    module(prompt)  # no part of it
    with lockstep.open(recording.session) as run:
        assert run.steps == range(3)
        assert run.tokens().prompt == (5, 6, 7)
        assert "layers.1.mlp.down" in run.captured
        weight = module.model.embed_tokens.weight.detach()
        assert torch.equal(torch.from_numpy(run.tensor("embed")), weight[[5, 6, 7]])
        assert run.session.meta.source.startswith("transformers ")
    assert os.listdir(tmp_path) == ["run.session"], "nothing else is left"
    assert "2 layers" in Shown(recording._repr_html_()).text
    assert "run.session" in repr(recording)
    assert capfd.readouterr().out == ""


def broken_off(module: Any, target: Path, calls: int, kept: list[lockstep.ModuleRecording]) -> None:
    """A user's block that raises after so many calls."""
    with lockstep.record(module, target) as recording:
        kept.append(recording)
        for _ in range(calls):
            module(torch.tensor([[5, 6, 7]]))
        raise KeyError("mine")


def test_an_error_passes_through_and_what_was_recorded_is_kept(module: Any, tmp_path: Path) -> None:
    before, kept = state(module), list[lockstep.ModuleRecording]()
    with pytest.raises(KeyError, match="mine") as raised:
        broken_off(module, tmp_path / "a.session", 1, kept)
    assert not getattr(raised.value, "__notes__", [])
    assert state(module) == before
    with lockstep.open(kept[0].session) as run:
        assert run.steps == range(1)


def test_an_error_before_the_first_call_passes_through_with_a_note(module: Any, tmp_path: Path) -> None:
    kept = list[lockstep.ModuleRecording]()
    with pytest.raises(KeyError, match="mine") as raised:
        broken_off(module, tmp_path / "a.session", 0, kept)
    assert raised.value.__notes__ == [
        "lockstep.record: nothing is recorded: no call of the module ended inside the block"
    ]
    assert kept[0].session is None
    assert os.listdir(tmp_path) == []


def test_a_block_without_a_call_is_an_error(module: Any, tmp_path: Path) -> None:
    with (
        pytest.raises(lockstep.ForeignDumpError, match="no call of the module"),
        lockstep.record(module, tmp_path / "a.session"),
    ):
        pass
    with (
        pytest.raises(lockstep.UsageError, match="capture is full or stats"),
        lockstep.record(module, capture="some"),
    ):
        pass
    (tmp_path / "b.txt").write_text("mine")
    with pytest.raises(FileExistsError), lockstep.record(module, tmp_path / "b.txt"):
        pass


def test_globs_and_statistics_keep_less(module: Any, tmp_path: Path) -> None:
    with lockstep.record(
        module, tmp_path / "a.session", only=["embed", "layers.0.*", "logits"], capture="stats"
    ) as recording:
        module(torch.tensor([[5, 6, 7]]))
    with lockstep.open(recording.session) as run:
        assert run.captured == ()
        assert not [tap for tap in run.taps if tap.startswith("layers.1")]
        assert run.statistics("layers.0.attn.q_proj")["absmax"][0] > 0


#: Texts of which one is another's beginning and two are equal, as of one prompt that was sampled from several times.
TEXTS = ((5, 6, 7, 8, 9), (11, 12, 13), (5, 6, 7), (11, 12, 13))


def packed() -> dict[str, torch.Tensor]:
    """All of them in one row, as trainers give it to a model."""
    collator = DataCollatorWithFlattening(return_flash_attn_kwargs=True)
    return dict(collator([{"input_ids": list(text), "labels": list(text)} for text in TEXTS]))


@pytest.mark.parametrize("filled", [0, 2])
def test_packed_texts_are_sequences_of_their_own(module: Any, tmp_path: Path, filled: int) -> None:
    """By the lengths that go in with them, or where a row is filled up by their positions alone."""
    row = packed()
    inputs = {name: row[name] for name in ("input_ids", "position_ids", "cu_seq_lens_q")}
    if filled:
        del inputs["cu_seq_lens_q"]
        inputs = {name: torch.nn.functional.pad(x, (0, filled)) for name, x in inputs.items()}
    with lockstep.record(module, tmp_path / "a.session") as recording:
        module(**inputs, use_cache=False)
    with lockstep.open(recording.session) as run:
        sequences = run.session.step(0).sequences
        assert [tuple(one.ids) for one in sequences] == list(TEXTS)
        assert [tuple(one.positions) for one in sequences] == [tuple(range(len(text))) for text in TEXTS]
        for seq, text in enumerate(TEXTS):
            alone = module(torch.tensor([text])).logits[0, -1].detach().numpy()
            np.testing.assert_allclose(run.tensor("logits", seq=seq)[-1], alone, atol=1e-5)


@pytest.mark.slow
def test_packed_texts_that_see_each_other_are_named_as_such(
    module: Any, checkpoint: Path, tmp_path: Path
) -> None:
    """With a mask of ones transformers takes a row for one text, whatever its positions."""
    row = packed()
    ids, positions = row["input_ids"], row["position_ids"]
    with lockstep.record(module, tmp_path / "a.session") as recording:
        module(ids, position_ids=positions, attention_mask=torch.ones_like(ids), use_cache=False)
    assert recording.session is not None
    with Session.open(recording.session) as session:
        (cause,) = diagnose(session, Facts.of(checkpoint, "float32")).causes
    assert "sequences that are packed into one row are not masked from each other" in cause.in_words()


def test_what_cannot_be_recorded_names_what_to_do(tmp_path: Path) -> None:
    with (
        pytest.raises(lockstep.UsageError, match=r"not object: .*`lockstep tap --write \.`"),
        lockstep.record(object(), tmp_path / "a.session"),  # type: ignore[arg-type]
    ):
        pass
    alone = torch.nn.Embedding(9, 4)
    with (
        pytest.raises(lockstep.ForeignDumpError, match=r"ids \[T\] without positions: call"),
        lockstep.record(alone, tmp_path / "a.session"),
    ):
        alone(torch.tensor([1, 2]))
