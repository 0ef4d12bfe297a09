"""SGLang's dumper: modules by name, layers by call, requests by id, layouts by the caller's dims."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from lockstep.workbench.foreign.passes import ForeignDumpError
from lockstep.workbench.foreign.readers.dims import layout_of
from lockstep.workbench.foreign.readers.sglang_dumper import open_sglang_dumper
from lockstep.workbench.models.dumps import recognised
from tests.checkpoints import tiny_model
from tests.workbench.foreign.readers.activations import computed
from tests.workbench.foreign.readers.comparing import all_passes, assert_is
from tests.workbench.foreign.readers.packed import PackedPass, Rank, packed
from tests.workbench.foreign.readers.sglang_writer import Dumper

PROMPTS = ([5, 17, 101, 3], [9, 64])
NAMES = ["a", "b"]


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_model("qwen2", num_hidden_layers=2)


@pytest.fixture(scope="module")
def passes(model: Any) -> list[PackedPass]:
    return list(packed(computed(model, PROMPTS, steps=1)))


def write(folder: Path, model: Any, passes: list[PackedPass], size: int) -> Path:
    """Inputs and modules of every pass on every rank; the folder of the experiment."""
    for rank in range(size):
        dumper = Dumper(folder, rank, size)
        for one in passes:
            dumper.batch(one, NAMES)
            dumper.modules(Rank(model, rank, size).modules(one.taps))
            dumper.dump(
                "non_intrusive__logits_processor.output.next_token_logits", one.taps["logits"][one.last]
            )
            dumper.step += 1
    model.config.to_json_file(dumper.folder / "config.json")
    return dumper.folder


@pytest.mark.parametrize("size", [1, 2])
def test_every_tap_is_what_was_computed(
    model: Any, passes: list[PackedPass], tmp_path: Path, size: int
) -> None:
    write(tmp_path, model, passes, size)
    assert recognised(tmp_path) == ["sglang-dumper"]
    run = open_sglang_dumper(tmp_path)  # the folder above that of the only experiment
    found = all_passes(run)
    assert len(found) == len(passes) == 2
    for k, each in enumerate(found):
        assert assert_is(each, passes[k]) == set(
            passes[k].taps
        )  # RoPE of every layer too: layer_id shows whose
        assert each[0].requests == tuple("aaaabb" if k == 0 else "ab")
    assert run.facts.ranks == size


def test_dims_report_the_layout_of_a_named_tensor(passes: list[PackedPass], tmp_path: Path) -> None:
    for rank in range(2):
        dumper = Dumper(tmp_path, rank, 2)
        dumper.batch(passes[0], NAMES)
        dumper.dump(
            "attn.o_proj.partial", torch.full((6, 64), rank + 1.0), dims="t h[tp:partial]", layer_id=1
        )
        dumper.dump("heads", torch.zeros(6, 4, 8), dims="t num_heads[tp] head_dim", layer_id=0)
        dumper.dump("router", torch.zeros(6, 4), dims="t e # tp:replicated", layer_id=0)
    found = [one.tensors for one in all_passes(open_sglang_dumper(tmp_path))[0]]
    assert [(one.tap, one.layout) for one in found[1]] == [
        ("layers.1.attn.o_proj.partial", "partial"), ("layers.0.heads", "shard(1)"), ("layers.0.router", "replicate"),
    ]  # fmt: skip
    assert found[1][0].array is not None
    assert found[1][0].array.min() == 2


@pytest.mark.parametrize(
    ("dims", "layout"),
    [
        ("t h", "replicate"), ("t h[tp]", "shard(1)"), ("b s h[tp:sharded]", "shard(1)"), ("t 1 h[tp]", "shard(1)"),
        ("t (heads*head_dim)[tp]", "shard(1)"), ("b s heads head_dim[tp]", "shard(2)"),
        ("t h[tp:partial,recompute_pseudo]", "partial"), ("t h # dp:=attn_dp tp:replicated", "replicate"),
    ],
)  # fmt: skip
def test_dims_are_layouts(dims: str, layout: str) -> None:
    assert layout_of(dims) == layout


@pytest.mark.parametrize(
    "dims", ["t[cp:zigzag] h", "t[sp] h", "t e[ep] h", "t[tp] h", "t a[tp] b[tp]", "", "t h["]
)
def test_dims_of_rows_that_are_spread_are_refused(dims: str) -> None:
    if dims:
        with pytest.raises(ForeignDumpError, match="dims"):
            layout_of(dims)
    else:
        assert layout_of(dims) == "replicate"


def test_the_same_argument_of_inner_modules_is_no_second_pass(
    passes: list[PackedPass], tmp_path: Path
) -> None:
    dumper = Dumper(tmp_path, 0, 1)
    dumper.batch(passes[0], None)
    dumper.dump("positions", passes[0].positions, layer_id=0)  # as `self_attn(positions=…)` gives
    dumper.dump("input_ids", passes[0].ids)
    (found,) = open_sglang_dumper(tmp_path).passes(0)
    assert found.requests is None
    dumper.dump("input_ids", passes[0].ids + 1)
    with pytest.raises(ForeignDumpError, match=r"dumper\.step\(\)"):
        list(open_sglang_dumper(tmp_path).passes(0))


def test_a_step_without_its_ids_reports_what_to_set(passes: list[PackedPass], tmp_path: Path) -> None:
    Dumper(tmp_path, 0, 1).dump("x", torch.zeros(3, 2))
    with pytest.raises(ForeignDumpError, match="DUMPER_NON_INTRUSIVE_MODE=core"):
        list(open_sglang_dumper(tmp_path).passes(0))


def test_other_parallelism_and_several_experiments_are_refused(
    passes: list[PackedPass], tmp_path: Path
) -> None:
    dumper = Dumper(tmp_path, 0, 1)
    path = dumper.dump("input_ids", passes[0].ids)
    loaded = torch.load(path, weights_only=True)
    loaded["meta"]["sglang_parallel_info"]["attn_dp_size"] = 2
    torch.save(loaded, path)
    with pytest.raises(ForeignDumpError, match="data-parallel attention"):
        open_sglang_dumper(tmp_path)
    (tmp_path / "dump_other").mkdir()
    with pytest.raises(ForeignDumpError, match="several experiments"):
        open_sglang_dumper(tmp_path)
