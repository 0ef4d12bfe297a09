"""Dumps of each format as sessions: what another engine computed is right by the checkpoint, and a bug is found."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, model_addition_debugger_context

from lockstep.sessions import Session
from lockstep.sessions.limits import UNLIMITED
from lockstep.workbench.cli.main import run as run_command
from lockstep.workbench.diagnosis.diagnose import diagnose
from lockstep.workbench.diagnosis.operations.facts import Facts
from lockstep.workbench.foreign.added import open_dump
from lockstep.workbench.foreign.importing import import_run
from lockstep.workbench.references.loading import CACHE
from tests.checkpoints import tiny_checkpoint
from tests.workbench.foreign.readers.activations import Computed, computed
from tests.workbench.foreign.readers.msprobe_writer import write_model
from tests.workbench.foreign.readers.packed import PackedPass, Rank, packed
from tests.workbench.foreign.readers.sglang_writer import Dumper, write_passes

pytestmark = pytest.mark.sampled_file(2)

PROMPTS = ([5, 17, 101, 3], [9, 64, 27, 80, 2, 44])
STEPS = 1


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("checkpoint"), "qwen2", num_hidden_layers=2)


@pytest.fixture(scope="module")
def model(checkpoint: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()


def write_sglang(folder: Path, model: Any, runs: list[Computed]) -> None:
    for rank in range(2):
        write_passes(folder, packed(runs), Rank(model, rank, 2))


def write_dumper(folder: Path, model: Any, runs: list[Computed]) -> None:
    for rank in range(2):
        dumper = Dumper(folder, rank, 2)
        for one in packed(runs):
            dumper.batch(one, ["a", "b"])
            dumper.modules(Rank(model, rank, 2).modules(one.taps))
            dumper.dump(
                "non_intrusive__logits_processor.output.next_token_logits", one.taps["logits"][one.last]
            )
            dumper.step += 1


def write_msprobe(folder: Path, model: Any, runs: list[Computed], **options: Any) -> None:
    write_model(folder, model, [{"input_ids": torch.tensor([ids])} for ids in runs[0].ids], **options)


def write_transformers(folder: Path, model: Any, runs: list[Computed]) -> None:
    cache = None
    for k, ids in enumerate(runs[0].ids):
        with model_addition_debugger_context(model, debug_path=str(folder / f"pass{k}"), use_repr=False):
            cache = model.forward(torch.tensor([ids]), use_cache=True, **{CACHE: cache})[CACHE]


WRITERS: dict[str, tuple[Callable[..., None], int]] = {
    "sglang": (write_sglang, 2),
    "sglang-dumper": (write_dumper, 2),
    "msprobe": (write_msprobe, 1),
    "transformers": (write_transformers, 1),
}


def imported(form: str, folder: Path, checkpoint: Path, target: Path) -> Path:
    import_run(open_dump(form, folder, checkpoint), target, form=form)
    return target


@pytest.mark.parametrize("form", WRITERS)
def test_a_faultless_run_is_right(form: str, model: Any, checkpoint: Path, tmp_path: Path) -> None:
    write, requests = WRITERS[form]
    runs = computed(model, PROMPTS, STEPS)[:requests]
    write(tmp_path / "dump", model, runs)
    path = imported(form, tmp_path / "dump", checkpoint, tmp_path / "run.session")
    with Session.open(path, UNLIMITED) as session:
        for seq, run in enumerate(runs):
            for step, taps in enumerate(run.passes):
                assert tuple(session.step(step).sequences[seq].ids) == run.ids[step]
                for tap in ("embed", "layers.1.attn.k_proj", "layers.0.mlp_residual", "final_norm"):
                    whole = session.rebuilt(tap, step=step, seq=seq, slice="").array
                    assert whole is not None
                    assert np.array_equal(whole, taps[tap].numpy()), (tap, step, seq)
        found = diagnose(session, Facts.of(checkpoint, "float32"))
    assert found.judged >= 2 * 7  # of each layer the norms, the linears, the activation
    assert not found.wrong


@pytest.mark.parametrize("form", ["sglang", "transformers"])  # fused modules, and plain ones
def test_a_wrong_operation_is_found(form: str, model: Any, checkpoint: Path, tmp_path: Path) -> None:
    """The engine drops the bias of one layer's k: all that follows is computed with that."""
    bias = model.model.layers[1].self_attn.k_proj.bias
    kept = bias.detach().clone()
    write, requests = WRITERS[form]
    with torch.no_grad():
        bias.zero_()
        try:
            write(tmp_path / "dump", model, computed(model, PROMPTS, STEPS)[:requests])
        finally:
            bias.copy_(kept)
    path = imported(form, tmp_path / "dump", checkpoint, tmp_path / "run.session")
    with Session.open(path, UNLIMITED) as session:
        found = diagnose(session, Facts.of(checkpoint, "float32"))
    assert {one.tap for one in found.wrong} == {"layers.1.attn.k_proj"}
    assert any("bias" in cause.text for cause in found.causes)


def test_statistics_of_a_pass_are_those_of_the_step(model: Any, checkpoint: Path, tmp_path: Path) -> None:
    runs = computed(model, PROMPTS[:1], STEPS)
    write_msprobe(tmp_path / "dump", model, runs, keep=("embed_tokens", "rotary_emb"))
    path = imported("msprobe", tmp_path / "dump", checkpoint, tmp_path / "run.session")
    (truth, *_) = (one.taps["layers.1.attn.q_proj"] for one in packed(runs))
    with Session.open(path, UNLIMITED) as session:
        names = [tap.name for tap in session.taps]
        stats = session.stats(0)
        assert stats is not None
        found = stats[names.index("layers.1.attn.q_proj"), 0]
        assert "layers.1.attn.q_proj.pass_statistics" in names
        assert session.meta.notes == (
            "where there are no tensors, statistics are of all rows of a pass together",
        )
    expected = [truth.min(), truth.max(), truth.mean(), truth.square().mean().sqrt(), truth.abs().max()]
    assert np.allclose(found[:5], torch.stack(expected).numpy(), rtol=1e-5, atol=1e-6)


def test_packed_rows_are_placed_by_request(model: Any, checkpoint: Path, tmp_path: Path) -> None:
    """SGLang names no requests: the second one's rows are found by position, wherever they stand in a pass."""
    runs = computed(model, PROMPTS, STEPS)
    one: PackedPass = next(packed(runs))
    assert len(one.ids) == sum(map(len, PROMPTS))
    write_sglang(tmp_path / "dump", model, runs)
    path = imported("sglang", tmp_path / "dump", checkpoint, tmp_path / "run.session")
    with Session.open(path, UNLIMITED) as session:
        assert [tuple(each.ids) for each in session.step(0).sequences] == [
            tuple(prompt) for prompt in PROMPTS
        ]
        emitted = [each.emitted for each in session.step(0).sequences]
        assert emitted == [run.ids[1][0] for run in runs]


@pytest.mark.parametrize("command", ["check", pytest.param("diagnose", marks=pytest.mark.slow)])
def test_statistics_alone_are_never_a_pass(
    command: str, model: Any, checkpoint: Path, tmp_path: Path, capsys: Any
) -> None:
    """The embedding and RoPE's angles are there, and right: of no operation are the numbers."""
    runs = computed(model, PROMPTS[:1], STEPS)
    write_msprobe(tmp_path / "dump", model, runs, keep=("embed_tokens", "rotary_emb"))
    path = imported("msprobe", tmp_path / "dump", checkpoint, tmp_path / "run.session")
    assert run_command([command, str(path), "--model", str(checkpoint)]) == 6
    reported = capsys.readouterr().out
    assert "statistics only" in reported
    assert "inconclusive" in reported
    assert "match" not in reported


class LateSums(Rank):
    """A rank of an engine that reduces with the next norm (SGLang's qwen2 and qwen3): linears give their own part."""

    def modules(self, taps: Any) -> Any:
        for name, x in super().modules(taps):
            inner = {"o_proj": "attn.context", "down_proj": "mlp.act"}.get(name.rpartition(".")[2])
            if inner is not None:
                weight = self.model.get_submodule(name).weight.detach()
                x = self.columns(taps[f"layers.{name.split('.')[2]}.{inner}"]) @ self.columns(weight).T
            yield name, x


def test_parts_that_are_summed_later_are_partial(model: Any, checkpoint: Path, tmp_path: Path) -> None:
    runs = computed(model, PROMPTS, STEPS)
    for rank in range(2):
        write_passes(tmp_path / "dump", packed(runs), LateSums(model, rank, 2))
    path = imported("sglang", tmp_path / "dump", checkpoint, tmp_path / "run.session")
    with Session.open(path, UNLIMITED) as session:
        assert session.tap("layers.0.attn.o_proj.partial").layout == "partial"
        assert "layers.0.attn.o_proj" not in {tap.name for tap in session.taps}
        whole = session.rebuilt("layers.1.mlp.down.partial", step=0, seq=1, slice="").array
        assert whole is not None
        assert np.allclose(whole, runs[1].passes[0]["layers.1.mlp.down"].numpy(), atol=1e-5)
        found = diagnose(session, Facts.of(checkpoint, "float32"))
    assert not found.wrong
    assert not found.harmless
