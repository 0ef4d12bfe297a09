"""msprobe's dumps: every tap is what transformers computed; where there are statistics alone, that is what is
reported."""

from __future__ import annotations

import json
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lockstep_msprobe import open_msprobe

from lockstep.workbench.foreign.passes import ForeignDumpError
from tests.checkpoints import tiny_model
from tests.workbench.foreign.readers.activations import Computed, computed
from tests.workbench.foreign.readers.comparing import all_passes, assert_is
from tests.workbench.foreign.readers.msprobe_writer import write_model, write_modules
from tests.workbench.foreign.readers.packed import Rank, packed

PROMPTS = ([5, 17, 101, 3], [9, 64])
LAST = 2


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_model("qwen3", num_hidden_layers=2)


@pytest.fixture(scope="module")
def runs(model: Any) -> list[Computed]:
    return computed(model, PROMPTS, steps=LAST)


def batches(run: Computed) -> list[dict[str, torch.Tensor]]:
    return [{"input_ids": torch.tensor([ids])} for ids in run.ids]


def test_a_transformers_model_is_what_was_computed(model: Any, runs: list[Computed], tmp_path: Path) -> None:
    write_model(tmp_path, model, batches(runs[0]))
    run = open_msprobe(tmp_path)
    found = all_passes(run)
    rope = {f"layers.{i}.attn.{x}_rope" for i in range(2) for x in "qk"}
    for each, truth in zip(found, packed(runs[:1]), strict=True):
        own = [one for one in each[0].tensors if one.tap in truth.taps]
        assert {one.tap for one in each[0].tensors} - {one.tap for one in own} == {
            "model.rotary_emb", "model.rotary_emb[1]", "layers.0.mlp.act_fn", "layers.1.mlp.act_fn",
        }  # fmt: skip
        seen = {one.tap for one in own}
        assert seen == set(truth.taps) - rope
        for one in own:
            assert one.array is not None
            assert np.array_equal(one.array.reshape(len(one.array), -1), truth.taps[one.tap].numpy()), one.tap
    assert run.facts.ranks == 1
    assert run.facts.source == "msprobe (tensor)"


@pytest.mark.parametrize(("size", "together"), [(2, False), (1, True)])
def test_a_fused_engine_is_what_was_computed(
    model: Any, runs: list[Computed], tmp_path: Path, size: int, together: bool
) -> None:
    """Packed rows of two requests, on two ranks; and all passes in one step."""
    for rank in range(size):
        write_modules(tmp_path, packed(runs), Rank(model, rank, size), together=together)
    model.config.to_json_file(tmp_path / "config.json")
    found = all_passes(open_msprobe(tmp_path))
    assert len(found) == LAST + 1
    for each, truth in zip(found, packed(runs), strict=True):
        assert assert_is(each, truth) == set(truth.taps)  # RoPE of both layers, which are calls of one module


def test_padding_is_nobodys_row(model: Any, tmp_path: Path) -> None:
    ids = torch.tensor([[5, 17, 101, 3], [0, 0, 9, 64]])
    mask = (torch.arange(4) >= torch.tensor([[0], [2]])).long()
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    write_model(
        tmp_path, model.model, [{"input_ids": ids, "attention_mask": mask, "position_ids": positions}]
    )
    for path in tmp_path.glob(
        "step0/rank/dump.json"
    ):  # the root itself has no hook: its mask stands in `model`
        reported = json.loads(path.read_text())
        reported["data"] = {
            key.replace("Module.", "Module.model."): value for key, value in reported["data"].items()
        }
        rotary = reported["data"]["Module.model.rotary_emb.Qwen3RotaryEmbedding.forward.0"]
        torch.save(mask, path.parent / "dump_tensor_data" / "mask.pt")
        like = next(
            one for one in (*rotary["input_args"], *rotary["input_kwargs"].values()) if "int" in one["dtype"]
        )
        reported["data"]["Module.model.Qwen3Model.forward.0"] = {
            "input_kwargs": {"attention_mask": like | {"shape": [2, 4], "data_name": "mask.pt"}}
        }
        path.write_text(json.dumps(reported))
    (found,) = open_msprobe(tmp_path).passes(0)
    assert found.positions == (0, 1, 2, 3, 0, 0, 0, 1)
    assert found.requests is not None
    assert [bool(one) for one in found.requests] == [True] * 4 + [False] * 2 + [True] * 2
    assert found.requests[0] != found.requests[-1]


def test_the_next_prompt_is_another_request(model: Any, runs: list[Computed], tmp_path: Path) -> None:
    """Both begin with the same token, as prompts do."""
    write_model(tmp_path, model, batches(runs[0])[:2])
    write_model(tmp_path / "more", model, batches(runs[0])[:1])
    (tmp_path / "more" / "step0").rename(tmp_path / "step2")
    first, second, third = (one.requests for one in open_msprobe(tmp_path).passes(0))
    assert first is not None
    assert second is not None
    assert third is not None
    assert first[0] == second[0] != third[0]


def test_statistics_alone_are_statistics(model: Any, runs: list[Computed], tmp_path: Path) -> None:
    write_model(tmp_path, model, batches(runs[0]), keep=("embed_tokens", "rotary_emb"), mode="md5")
    run = open_msprobe(tmp_path)
    first, second, _ = run.passes(0)
    (truth, later, _) = (one.taps for one in packed(runs[:1]))
    tensors = {one.tap: one for one in first.tensors}
    assert tensors["embed"].array is not None
    q = tensors["layers.1.attn.q_proj"]
    expected = truth["layers.1.attn.q_proj"]
    assert (q.array, q.hashes, q.rows) == (None, None, None)  # of four rows together: no row's
    assert q.statistics is not None
    reported = [
        expected.min(),
        expected.max(),
        expected.mean(),
        expected.square().mean().sqrt(),
        expected.abs().max(),
    ]
    assert np.allclose(q.statistics[0, :5], torch.stack(reported).numpy(), rtol=1e-5, atol=1e-6)
    assert np.isnan(q.statistics[0, 5:]).all()  # msprobe counts no NaN and no zeros
    one_row = next(one for one in second.tensors if one.tap == "layers.1.mlp.down")
    assert one_row.hashes is not None
    assert one_row.hashes[0] == zlib.crc32(later["layers.1.mlp.down"].numpy().tobytes())
    assert any("of all rows of a pass together" in note for note in run.facts.notes)


def test_statistics_of_a_fused_product_are_of_no_part(
    model: Any, runs: list[Computed], tmp_path: Path
) -> None:
    write_modules(tmp_path, packed(runs[:1]), Rank(model, 0, 1), keep=("embed_tokens", "rotary_emb"))
    model.config.to_json_file(tmp_path / "config.json")
    taps = {one.tap for one in next(iter(open_msprobe(tmp_path).passes(0))).tensors}
    assert {"layers.0.self_attn.qkv_proj", "layers.0.mlp.gate_up_proj", "layers.0.attn.context"} <= taps
    assert not {"layers.0.attn.q_proj", "layers.0.mlp.gate"} & taps


def test_ids_that_no_dump_has_are_reported_beside_it(
    model: Any, runs: list[Computed], tmp_path: Path
) -> None:
    write_model(tmp_path, model, batches(runs[0]), keep=())
    with pytest.raises(ForeignDumpError, match=r'"tensor_list": \["embed_tokens", "rotary_emb"\].*ids\.json'):
        list(open_msprobe(tmp_path).passes(0))
    (tmp_path / "ids.json").write_text(json.dumps({"passes": runs[0].ids}))
    found = list(open_msprobe(tmp_path).passes(0))
    assert [one.ids for one in found] == list(runs[0].ids)
    assert [one.positions for one in found] == [
        (0, 1, 2, 3),
        (4,),
        (5,),
    ]  # from their least and their largest
    (tmp_path / "ids.json").write_text('{"passes": [[1, 2]]}')
    with pytest.raises(ForeignDumpError, match="which 1x4 tokens"):
        list(open_msprobe(tmp_path).passes(0))
    (tmp_path / "ids.json").write_text('{"passes": ["x"]}')
    with pytest.raises(ForeignDumpError, match=r"ids\.json.*it holds"):
        open_msprobe(tmp_path)


def test_a_placement_is_a_layout(model: Any, runs: list[Computed], tmp_path: Path) -> None:
    write_model(tmp_path, model, batches(runs[0])[:1])
    path = tmp_path / "step0" / "rank" / "dump.json"
    reported = json.loads(path.read_text())
    for module, placement in (
        ("o_proj", {"Partial": {"reduce_op": "sum"}}),
        ("q_proj", {"Shard": {"dim": -1}}),
    ):
        entry = next(
            value for key, value in reported["data"].items() if f"layers.0.self_attn.{module}" in key
        )
        entry["output"][0]["placements"] = [placement]
    path.write_text(json.dumps(reported))
    layouts = {one.tap: one.layout for one in next(iter(open_msprobe(tmp_path).passes(0))).tensors}
    assert (layouts["layers.0.attn.o_proj"], layouts["layers.0.attn.q_proj"]) == ("partial", "shard(1)")


def test_what_cannot_be_read_is_reported(model: Any, runs: list[Computed], tmp_path: Path) -> None:
    with pytest.raises(ForeignDumpError, match="no step0/rank0"):
        open_msprobe(tmp_path)
    write_model(tmp_path, model, batches(runs[0])[:1])
    path = tmp_path / "step0" / "rank" / "dump.json"
    reported = json.loads(path.read_text())
    reported["data"] = {key: value for key, value in reported["data"].items() if "embed_tokens" not in key}
    path.write_text(json.dumps(reported))
    with pytest.raises(ForeignDumpError, match="no call of embed_tokens"):
        list(open_msprobe(tmp_path).passes(0))
    (tmp_path / "step0" / "proc77").mkdir()
    (tmp_path / "step0" / "proc77" / "dump.json").write_text("{}")
    with pytest.raises(ForeignDumpError, match=r"proc77.*both rank 0"):
        open_msprobe(tmp_path)
