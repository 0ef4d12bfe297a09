"""MXFP4 blocks against transformers' own dequantisation, at every degree of parallelism."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, Mxfp4Config
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from lockstep.engine.checkpoint.load import shards_of
from lockstep.engine.checkpoint.mxfp4 import unpacked
from lockstep.engine.checkpoint.resolve import open_checkpoint
from lockstep.engine.checkpoint.stacks import stored_in
from lockstep.engine.checkpoint.verify import verify
from lockstep.engine.errors import CheckpointError
from lockstep.engine.parallel import shards
from lockstep.engine.parallel.shards import Span
from tests.checkpoints import mxfp4_checkpoint
from tests.engine.harness import Engine, reference_logits

pytestmark = pytest.mark.sampled_file(2)

STACK = "model.layers.1.mlp.experts.gate_up_proj"
PROMPT = [3, 130, 17, 99, 4, 64, 5, 12, 77, 120, 31, 8, 56]
STEPS = 4


def test_every_byte_under_every_scale_has_the_bits_of_transformers() -> None:
    blocks = torch.arange(256, dtype=torch.uint8).view(16, 1, 16).expand(16, 256, 16)
    scales = torch.arange(256, dtype=torch.uint8).expand(16, 256)
    theirs = convert_moe_packed_tensors(blocks.unsqueeze(0), scales.unsqueeze(0), dtype=torch.float32)[0].T
    ours = unpacked(blocks.numpy(), scales.numpy())
    np.testing.assert_array_equal(ours, theirs.numpy())
    finite = ~np.isnan(ours)
    assert (np.signbit(ours) == np.signbit(theirs.numpy()))[finite].all()
    assert np.array_equal(torch.from_numpy(ours).bfloat16().float().numpy(), ours, equal_nan=True)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("sizes", [{}, {"hidden_size": 96, "intermediate_size": 96}])
def test_shards_are_those_of_what_transformers_loads(sizes: dict[str, int], tmp_path: Path) -> None:
    """96 columns over two and four ranks begin and end within groups."""
    path = mxfp4_checkpoint(tmp_path, **sizes)
    options = {"dtype": torch.float32, "quantization_config": Mxfp4Config(dequantize=True)}
    whole = AutoModelForCausalLM.from_pretrained(path, **options).state_dict()
    model, source = open_checkpoint(path)
    whole |= {name: place.of(whole[place.tensor]) for name, place in stored_in(model).items()}
    with source:
        verify(source, model)
        assert source.names() == shards.parameters(model).keys()
        for tp, ep in ((1, 1), (2, 1), (2, 2), (4, 1), (4, 2)):
            for rank in range(tp):
                plans = {name: shards.plan(name, model, tp, rank, ep) for name in shards.parameters(model)}
                for name, tensor in shards_of(
                    source, model, tp, rank, dtype="float32",
                    plan=lambda name, *_, found=plans: found[name],
                ):  # fmt: skip
                    plan, expected = plans[name], whole[name]
                    if plan.dim is not None:
                        expected = expected.narrow(plan.dim, plan.span.start, plan.span.size)
                    assert torch.equal(tensor, expected), (name, tp, ep, rank)


def test_each_byte_is_read_once(tmp_path: Path) -> None:
    path = mxfp4_checkpoint(tmp_path)
    model, source = open_checkpoint(path)
    size = sum(tensor.nbytes for tensor in load_file(path / "model.safetensors").values())
    with source:
        list(shards_of(source, model, 1, 0, dtype="bfloat16"))
        assert source.bytes_read == size
        listed = [source.info(name) for name in source.names()]
        assert sum(info.nbytes for info in listed) == size
        assert {info.encoding for info in listed} == {"", "MXFP4"}


def test_a_part_that_is_read_alone_is_the_same(tmp_path: Path) -> None:
    """Gate without up, and other rows of gate before up: nothing that was kept of the pair is mixed up."""
    _, source = open_checkpoint(mxfp4_checkpoint(tmp_path))
    gate, up = (f"model.layers.1.mlp.experts.3.{one}_proj.weight" for one in ("gate", "up"))
    with source:
        whole = {name: source.read(name) for name in (gate, up)}
        for name, dim, span in (
            (gate, 0, Span(4, 9)), (gate, 0, Span(4, 9)), (up, 0, Span(3, 9)), (gate, 1, Span(5, 40)),
            (up, 1, Span(5, 40)), (up, 0, Span(4, 4)), (gate, None, None),
        ):  # fmt: skip
            expected = whole[name] if dim is None else whole[name].narrow(dim, span.start, span.size)
            assert torch.equal(source.read(name, dim, span), expected)


@pytest.mark.parametrize(
    ("change", "reported"),
    [
        (lambda t: {f"{STACK}_scales": t[f"{STACK}_scales"][:, :-1].contiguous()}, r"expected uint8 \[experts"),
        (lambda t: {f"{STACK}_blocks": t[f"{STACK}_blocks"].float()}, "_blocks is float32"),
        (lambda t: {f"{STACK}_blocks": None}, "there is no .*gate_up_proj_blocks"),
        (lambda t: {f"{STACK}_scales": None}, "16 missing: .*gate_proj.*1 unexpected: .*gate_up_proj_blocks"),
        (
            lambda t: {name: t[name][:-1].contiguous() for name in (f"{STACK}_blocks", f"{STACK}_scales")},
            "16 missing: .*unexpected: .*gate_up_proj_blocks",
        ),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_one_error(change: Callable[..., dict], reported: str, tmp_path: Path) -> None:
    file = mxfp4_checkpoint(tmp_path) / "model.safetensors"
    tensors = load_file(file)
    tensors = {name: tensor for name, tensor in (tensors | change(tensors)).items() if tensor is not None}
    save_file(tensors, file, {"format": "pt"})

    def verified() -> None:
        model, source = open_checkpoint(file.parent)
        verify(source, model)

    with pytest.raises(CheckpointError, match=reported):
        verified()


def test_a_truncated_file_is_one_error(tmp_path: Path) -> None:
    file = mxfp4_checkpoint(tmp_path) / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match="truncated"):
        open_checkpoint(file.parent)


def test_other_families_in_mxfp4_are_refused(tmp_path: Path) -> None:
    config = mxfp4_checkpoint(tmp_path) / "config.json"
    fields = json.loads(config.read_text())
    config.write_text(json.dumps(fields | {"quantization_config": {"quant_method": "fp8"}}))
    with pytest.raises(Exception, match="quantised weights are not supported"):
        open_checkpoint(config.parent)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("tp", "ep"), [(1, 1), (2, 1), (2, 2), (4, 1), (4, 2)])
def test_logits_are_those_of_transformers(
    tp: int, ep: int, engine_of: Callable[[int], Engine], tmp_path: Path
) -> None:
    path = mxfp4_checkpoint(tmp_path)
    engine = engine_of(tp)
    engine.load(path, ep=ep, dtype="float32")
    engine.capture("logits")
    passes = engine.generate([PROMPT], STEPS)
    options = {"dtype": torch.float32, "quantization_config": Mxfp4Config(dequantize=True)}
    model = AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager", **options).eval()
    golden, tokens = reference_logits(model, PROMPT, STEPS)
    assert [one.token() for one in passes] == tokens
    assert np.abs(np.stack([one.logits() for one in passes]) - golden.numpy()).max() <= 1e-4
