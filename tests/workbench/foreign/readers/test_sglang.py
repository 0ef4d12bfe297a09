"""SGLang's pass dump: every tap of every rank is what transformers computed, and its traps are reported."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from lockstep.workbench.foreign.passes import ForeignDumpError
from lockstep.workbench.foreign.readers.sglang import open_sglang
from lockstep.workbench.models.dumps import recognised
from tests.checkpoints import tiny_model
from tests.workbench.foreign.readers.activations import computed
from tests.workbench.foreign.readers.comparing import all_passes, assert_is
from tests.workbench.foreign.readers.packed import PackedPass, Rank, packed
from tests.workbench.foreign.readers.sglang_writer import write_passes

PROMPTS = ([5, 17, 101, 3], [9, 64, 27, 80, 2, 44], [70])


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_model("qwen3", num_hidden_layers=2)


@pytest.fixture(scope="module")
def passes(model: Any) -> list[PackedPass]:
    return list(packed(computed(model, PROMPTS, steps=2)))


@pytest.fixture
def folder(model: Any, passes: list[PackedPass], tmp_path: Path) -> Path:
    """Two ranks and a config."""
    for rank in range(2):
        write_passes(tmp_path / "dump", passes, Rank(model, rank, 2))
    model.config.to_json_file(tmp_path / "dump" / "config.json")
    return tmp_path / "dump"


@pytest.mark.parametrize("size", [1, 2, 4])
def test_every_tap_is_what_was_computed(
    model: Any, passes: list[PackedPass], tmp_path: Path, size: int
) -> None:
    for rank in range(size):
        write_passes(tmp_path, passes, Rank(model, rank, size))
    model.config.to_json_file(tmp_path / "config.json")  # two KV heads: over four ranks each is there twice
    assert recognised(tmp_path) == ["sglang"]
    run = open_sglang(tmp_path)
    found = all_passes(run)
    assert len(found) == len(passes)
    expected = set(passes[0].taps) - {"layers.0.attn.q_rope", "layers.0.attn.k_rope"}
    for k, each in enumerate(found):
        assert assert_is(each, passes[k]) == (expected if k < len(passes) - 1 else expected - {"logits"})
    facts = run.facts
    assert facts.ranks == size
    assert facts.model.num_kv_heads == 2
    assert any("share one rotary_emb" in note for note in facts.notes)
    assert any("logits of the last pass" in note for note in facts.notes)


def test_logits_are_of_the_pass_before_the_file_that_holds_them(
    folder: Path, passes: list[PackedPass]
) -> None:
    first = next(iter(open_sglang(folder).passes(0)))
    (logits,) = (one for one in first.tensors if one.tap == "logits")
    assert logits.rows == (3, 9, 10)
    assert torch.equal(torch.from_numpy(logits.array), passes[0].taps["logits"][[3, 9, 10]])


def test_logits_that_stand_in_their_own_file_stay_there(folder: Path, passes: list[PackedPass]) -> None:
    """Whose hook adds its output before it writes: what the top module gave equals what its last norm gave."""
    for path in folder.glob("*/Pass*.pt"):
        loaded = torch.load(path, weights_only=True)
        one = passes[int(path.stem[4:])]
        torch.save(
            loaded | {"model": one.taps["final_norm"], "logits_processor": one.taps["logits"][one.last]}, path
        )
    found = all_passes(open_sglang(folder))
    assert all("logits" in assert_is(each, passes[k]) for k, each in enumerate(found))


def test_logits_of_a_lost_file_go_to_no_other_pass(folder: Path) -> None:
    (folder / "TP0_PP0_Rank0_pid100" / "Pass00001.pt").unlink()
    first, second = open_sglang(folder).passes(0)
    assert (first.index, second.index) == (0, 2)
    assert not [one for one in (*first.tensors, *second.tensors) if one.tap == "logits"]


def test_without_a_config_the_width_of_attention_cuts_the_fused_product(
    folder: Path, passes: list[PackedPass]
) -> None:
    (folder / "config.json").unlink()
    first = next(iter(open_sglang(folder).passes(1)))
    found = {one.tap: one for one in first.tensors}
    k = found["layers.1.attn.k_proj"]
    assert torch.equal(torch.from_numpy(k.array), passes[0].taps["layers.1.attn.k_proj"].chunk(2, -1)[1])
    assert k.layout == ""  # how many ranks share a head is not known


def test_rows_behind_the_last_request_are_left_out_and_reported(
    folder: Path, passes: list[PackedPass]
) -> None:
    path = folder / "TP0_PP0_Rank0_pid100" / "Pass00001.pt"
    loaded = torch.load(path, weights_only=True)
    rows = len(loaded["model.forward_batch_info.input_ids"])
    for name, x in loaded.items():
        if (
            isinstance(x, torch.Tensor)
            and len(x) == rows
            and not name.endswith(("processor", "model", "seq_lens"))
        ):
            loaded[name] = torch.cat([x, torch.zeros_like(x[:2])])
    torch.save(loaded, path)
    run = open_sglang(folder)
    second = list(run.passes(0))[1]
    assert second.ids == tuple(passes[1].ids.tolist())
    embed = second.tensors[0]
    assert embed.tap == "embed"
    assert torch.equal(torch.from_numpy(embed.array), passes[1].taps["embed"])
    assert any("padding" in note for note in run.facts.notes)


def test_tensors_that_share_memory_were_overwritten(folder: Path) -> None:
    path = folder / "TP0_PP0_Rank0_pid100" / "Pass00000.pt"
    loaded = torch.load(path, weights_only=True)
    loaded["model.embed_tokens"] = loaded["model.layers.0.post_attention_layernorm"][
        1
    ]  # as on the CPU: an alias
    torch.save(loaded, path)
    run = open_sglang(folder)
    first = next(iter(run.passes(0)))
    assert "embed" not in {one.tap for one in first.tensors}
    assert "layers.0.attn_residual" in {one.tap for one in first.tensors}
    assert any("share memory" in note for note in run.facts.notes)


def test_a_rank_without_a_folder_has_no_passes(folder: Path) -> None:
    shutil.rmtree(folder / "TP0_PP0_Rank0_pid100")
    run = open_sglang(folder)
    assert run.facts.ranks == 2
    assert list(run.passes(0)) == []
    assert len(list(run.passes(1))) == 3


def test_two_processes_of_one_rank_are_two_runs(model: Any, passes: list[PackedPass], folder: Path) -> None:
    write_passes(folder, passes, Rank(model, 0, 2), pid=900)
    with pytest.raises(ForeignDumpError, match=r"several runs.*pid100.*pid900.*folder of their own"):
        open_sglang(folder)


def test_pipeline_stages_are_refused(folder: Path) -> None:
    (folder / "TP0_PP1_Rank2_pid7").mkdir()
    with pytest.raises(ForeignDumpError, match="pp-size 1"):
        open_sglang(folder)


def test_lengths_that_do_not_fit_the_positions_are_refused_by_file(folder: Path) -> None:
    path = folder / "TP0_PP0_Rank0_pid100" / "Pass00000.pt"
    loaded = torch.load(path, weights_only=True)
    torch.save(loaded | {"model.forward_batch_info.seq_lens": torch.tensor([4, 99, 1])}, path)
    with pytest.raises(ForeignDumpError, match=r"Pass00000\.pt.*99 tokens long"):
        list(open_sglang(folder).passes(0))
