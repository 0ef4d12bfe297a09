"""transformers' debugging context: its own writer on a tiny model, read back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import model_addition_debugger_context

from lockstep.workbench.foreign.passes import ForeignDumpError, ForeignTensor
from lockstep.workbench.foreign.readers.transformers import open_transformers
from lockstep.workbench.models.dumps import recognised
from lockstep.workbench.references.loading import CACHE
from tests.checkpoints import tiny_model
from tests.workbench.foreign.readers.activations import Computed, computed
from tests.workbench.foreign.readers.packed import packed

PROMPT = [5, 17, 101, 3]


@pytest.fixture(scope="module")
def model() -> Any:
    """Four layers, of which the tree keeps two."""
    return tiny_model("qwen3", num_hidden_layers=4)


@pytest.fixture(scope="module")
def run(model: Any) -> Computed:
    return computed(model, [PROMPT], steps=10)[0]


@pytest.fixture(scope="module")
def folder(model: Any, run: Computed, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder a pass, whose names sort otherwise as text: pass2 and pass10."""
    path = tmp_path_factory.mktemp("dump")
    cache = None
    for k, ids in enumerate(run.ids):
        if k in (1, 9):
            with model_addition_debugger_context(
                model, debug_path=str(path / f"pass{k + 1}"), use_repr=False
            ):
                cache = model.forward(torch.tensor([ids]), use_cache=True, **{CACHE: cache})[CACHE]
        elif k == 0:
            options = {"debug_path": str(path / "pass1"), "use_repr": False, "do_prune_layers": False}
            with model_addition_debugger_context(model, **options):
                cache = model.forward(torch.tensor([ids]), use_cache=True)[CACHE]
        else:
            with torch.inference_mode():
                model(torch.tensor([ids]), use_cache=True, **{CACHE: cache})
    return path


def numbers(one: ForeignTensor) -> np.ndarray:
    assert one.array is not None
    return one.array.reshape(len(one.array), -1)


def test_every_tap_is_what_was_computed(run: Computed, folder: Path) -> None:
    assert recognised(folder) == ["transformers"]
    found = list(open_transformers(folder).passes(0))
    assert [one.ids for one in found] == [run.ids[0], run.ids[1], run.ids[9]]
    assert [one.positions for one in found] == [(0, 1, 2, 3), (4,), (12,)]
    truths = list(packed([run]))
    rope = {f"layers.{i}.attn.{x}_rope" for i in range(4) for x in "qk"}
    for one, truth in zip(found, (truths[0], truths[1], truths[9]), strict=True):
        tensors = {tensor.tap: tensor for tensor in one.tensors}
        assert set(truth.taps) - rope <= set(tensors)  # layers that the tree leaves out as well
        for tap in set(truth.taps) - rope:
            assert np.array_equal(numbers(tensors[tap]), truth.taps[tap].numpy()), tap


def test_taps_come_in_the_order_of_execution(folder: Path) -> None:
    for one in open_transformers(folder).passes(0):
        taps = [tensor.tap for tensor in one.tensors]
        assert taps[0] == "embed"
        assert taps[-2:] == ["final_norm", "logits"]
        layers = [int(tap.split(".")[1]) for tap in taps if tap.endswith(".attn.q_proj")]
        assert layers == [0, 1, 2, 3]
        assert (
            taps.index("layers.2.attn_norm")
            < taps.index("layers.2.attn.o_proj")
            < taps.index("layers.2.mlp.down")
        )


def test_one_pass_is_a_folder_of_its_own(run: Computed, folder: Path) -> None:
    (found,) = open_transformers(folder / "pass1").passes(0)
    assert found.ids == run.ids[0]


def test_padding_is_nobodys_row(model: Any, tmp_path: Path) -> None:
    ids = torch.tensor([[5, 17, 101, 3], [0, 0, 9, 64]])
    mask = (torch.arange(4) >= torch.tensor([[0], [2]])).long()
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    with model_addition_debugger_context(model, debug_path=str(tmp_path), use_repr=False):
        model.forward(ids, attention_mask=mask, position_ids=positions, logits_to_keep=1)
    (found,) = open_transformers(tmp_path).passes(0)
    assert found.requests is not None
    assert [bool(one) for one in found.requests] == [True] * 4 + [False] * 2 + [True] * 2
    assert found.positions == (0, 1, 2, 3, 0, 0, 0, 1)
    logits = found.tensors[-1]
    assert (logits.tap, logits.rows) == ("logits", (3, 7))
    with torch.inference_mode():
        alone = model(torch.tensor([[9, 64]])).logits[0, -1].numpy()
    assert np.allclose(numbers(logits)[1], alone, atol=1e-5)


def test_bfloat16_keeps_its_bits(tmp_path: Path) -> None:
    small = tiny_model("llama", num_hidden_layers=1).to(torch.bfloat16)
    with model_addition_debugger_context(small, debug_path=str(tmp_path), use_repr=False):
        small.forward(torch.tensor([PROMPT]))
    (found,) = open_transformers(tmp_path).passes(0)
    embed = found.tensors[0]
    expected = small.model.embed_tokens.weight[PROMPT].detach().view(torch.int16).numpy().view(np.uint16)
    assert embed.dtype == "bfloat16"
    assert np.array_equal(numbers(embed), expected)


def test_text_of_four_digits_is_refused(model: Any, tmp_path: Path) -> None:
    with model_addition_debugger_context(model, debug_path=str(tmp_path)):
        model.forward(torch.tensor([PROMPT]))
    with pytest.raises(ForeignDumpError, match=r"four digits.*use_repr=False"):
        list(open_transformers(tmp_path).passes(0))


def test_one_ranks_shard_is_refused(model: Any, folder: Path, tmp_path: Path) -> None:
    model.config.to_json_file(tmp_path / "config.json")
    reported = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(reported | {"num_attention_heads": 16}))
    with pytest.raises(ForeignDumpError, match=r"128 wide, and the model's 256.*on one rank"):
        list(open_transformers(folder, tmp_path).passes(0))


def test_what_is_no_dump_is_reported(tmp_path: Path) -> None:
    with pytest.raises(ForeignDumpError, match="_debug_tree_FULL_TENSORS"):
        open_transformers(tmp_path)
    for kind in ("A", "B"):
        (tmp_path / f"{kind}_debug_tree_FULL_TENSORS.json").write_text("{}")
    with pytest.raises(ForeignDumpError, match="several models"):
        open_transformers(tmp_path)
