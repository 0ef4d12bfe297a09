"""Loading a rank's shards: equal to cutting the whole, strict beforehand, the same through rank 0."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from lockstep.engine.checkpoint.load import rank0_shards, shards_of
from lockstep.engine.checkpoint.resolve import open_checkpoint
from lockstep.engine.checkpoint.source import Source
from lockstep.engine.checkpoint.stacks import stored_in
from lockstep.engine.checkpoint.verify import verify
from lockstep.engine.checkpoint.wrapped import naming
from lockstep.engine.config import DType, ModelConfig
from lockstep.engine.errors import CheckpointError
from lockstep.engine.parallel import shards
from lockstep.engine.parallel.shards import Shard, Span
from tests.checkpoints import EVERY_VARIANT, tiny_checkpoint, tiny_model, tiny_variant

pytestmark = pytest.mark.sampled_file(2)

Tensors = dict[str, torch.Tensor]


def _cut(whole: Tensors, model: ModelConfig, tp: int, rank: int) -> Tensors:
    """The reference: load everything, then narrow."""
    plans = {name: shards.plan(name, model, tp, rank) for name in whole}
    return {
        name: whole[name]
        if plan.dim is None
        else whole[name].narrow(plan.dim, plan.span.start, plan.span.size)
        for name, plan in plans.items()
    }


def _equal(ours: Tensors, theirs: Tensors) -> None:
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert tensor.dtype == theirs[name].dtype
        assert torch.equal(tensor, theirs[name]), name


@pytest.mark.sampled(18)
@pytest.mark.parametrize("variant", EVERY_VARIANT)
def test_the_shards_of_all_ranks_are_the_checkpoint_cut(variant: str, tmp_path: Path) -> None:
    path = tiny_variant(tmp_path, variant, max_shard_size="100KB")
    family, overrides = EVERY_VARIANT[variant]
    whole = tiny_model(family, **overrides).state_dict()
    for file in path.glob(
        "*.safetensors"
    ):  # where transformers calls a tensor otherwise than its checkpoints
        whole |= load_file(file)
    model, source = open_checkpoint(path)
    whole = {naming(model)(name): tensor for name, tensor in whole.items()}
    stacked = {name: place for name, place in stored_in(model).items() if place.tensor in whole}
    whole |= {name: place.of(whole[place.tensor]) for name, place in stacked.items()}
    whole = {name: whole[name] for name in shards.parameters(model)}  # without a tied head's alias
    for tp in (1, 2, 4, 8):
        before = source.bytes_read
        for rank in range(tp):
            _equal(dict(shards_of(source, model, tp, rank, dtype="float32")), _cut(whole, model, tp, rank))
        plans = [shards.plan(name, model, tp, rank) for name in whole for rank in range(tp)]
        read = source.bytes_read - before
        own = 4 * sum(torch.Size(plan.local_shape).numel() for plan in plans)
        assert read == own


def test_tensors_come_in_the_forwards_order_and_dtype(tmp_path: Path) -> None:
    model, source = open_checkpoint(tiny_checkpoint(tmp_path, "llama", dtype=torch.bfloat16))
    loaded = list(shards_of(source, model, 1, 0, dtype="float16"))
    assert [name for name, _ in loaded] == list(shards.parameters(model))
    assert {tensor.dtype for _, tensor in loaded} == {torch.float16}
    assert torch.equal(loaded[0][1], source.read(loaded[0][0]).to(torch.float16))


def test_the_seams_keep_plan_and_transform(tmp_path: Path) -> None:
    model, source = open_checkpoint(tiny_checkpoint(tmp_path, "qwen2"))

    def plan(name: str, model: ModelConfig, tp: int, rank: int) -> Shard:
        if name.endswith("q_proj.weight"):
            return Shard((64, 64), 1, Span(32 * rank, 32 * rank + 32))
        return shards.plan(name, model, tp, rank)

    first, final = "model.layers.0.input_layernorm.weight", "model.norm.weight"
    loaded = dict(
        shards_of(
            source,
            model,
            2,
            1,
            dtype="float32",
            keep=lambda name: not name.endswith(".bias"),
            plan=plan,
            tensor_of=lambda name, model: final if name == first else name,
        )
    )
    assert not [name for name in loaded if name.endswith(".bias")]
    query = "model.layers.0.self_attn.q_proj.weight"
    assert torch.equal(loaded[query], source.read(query)[:, 32:])
    assert torch.equal(loaded[first], source.read(final))


# --- strict --------------------------------------------------------------------------------------------------


def _edited(
    tmp_path: Path, family: str, edit: Tensors, drop: tuple[str, ...] = ()
) -> tuple[ModelConfig, Source]:
    path = tiny_checkpoint(tmp_path, family)
    tensors = load_file(path / "model.safetensors")
    save_file({n: t for n, t in (tensors | edit).items() if n not in drop}, path / "model.safetensors")
    return open_checkpoint(path)


def test_one_error_names_every_tensor_that_does_not_fit(tmp_path: Path) -> None:
    model, source = _edited(
        tmp_path,
        "qwen2",
        {
            "model.layers.0.mlp.surprise.weight": torch.ones(3),
            "model.layers.1.mlp.up_proj.weight": torch.ones(64, 96),
            "model.norm.weight": torch.ones(64, dtype=torch.int32),
        },
        drop=("model.layers.2.self_attn.k_proj.bias",),
    )
    with pytest.raises(CheckpointError) as caught:
        shards_of(source, model, 2, 0, dtype="float32")
    assert str(caught.value) == (
        f"{tmp_path}/tiny-qwen2: tensors do not fit the configuration (qwen2): "
        "1 missing: model.layers.2.self_attn.k_proj.bias [16]; "
        "1 unexpected: model.layers.0.mlp.surprise.weight (in model.safetensors); "
        "1 misshapen: model.layers.1.mlp.up_proj.weight is [64, 96] in model.safetensors, "
        "the configuration expects [96, 64]; "
        "1 not float32, bfloat16, float16: model.norm.weight is int32 in model.safetensors"
    )
    assert source.bytes_read == 0


def test_many_offenders_are_counted_and_the_first_few_named(tmp_path: Path) -> None:
    extra = {f"extra.{i:03}": torch.ones(1) for i in range(100)}
    model, source = _edited(tmp_path, "llama", extra)
    with pytest.raises(CheckpointError, match=r"100 unexpected: extra\.000 .* and 95 more$") as caught:
        verify(source, model)
    assert len(str(caught.value)) < 500


def test_common_mistakes_are_explained(tmp_path: Path) -> None:
    model, source = _edited(tmp_path, "llama", {}, drop=("lm_head.weight",))
    with pytest.raises(CheckpointError, match=r"1 missing: lm_head\.weight .*tie_word_embeddings: true"):
        verify(source, model)
    bare = tmp_path / "bare"
    tiny_model("llama").model.save_pretrained(bare)
    model, source = open_checkpoint(bare)
    with pytest.raises(CheckpointError, match=r"saved from the bare model, without its head"):
        verify(source, model)


def test_what_transformers_ignores_is_ignored_and_noted(tmp_path: Path) -> None:
    frequencies = {f"model.layers.{i}.self_attn.rotary_emb.inv_freq": torch.ones(4) for i in range(3)}
    model, source = _edited(tmp_path, "qwen2", frequencies)
    verify(source, model)
    assert model.notes == (
        "ignored model.layers.0.self_attn.rotary_emb.inv_freq and 2 more: rotary frequencies are computed from the "
        "configuration",
    )
    assert "lm_head.weight" not in dict(shards_of(source, model, 1, 0, dtype="float32"))


# --- rank 0 reads for all ------------------------------------------------------------------------------------


class Mailbox:
    """Point-to-point between threads; a tensor is copied when sent, as a collective library does."""

    def __init__(self, tp: int) -> None:
        self.queues = [queue.Queue[torch.Tensor]() for _ in range(tp)]
        self.sent = 0

    def send(self, tensor: torch.Tensor, rank: int) -> None:
        assert tensor.is_contiguous()
        assert tensor.numel() > 0
        self.sent += 1
        self.queues[rank].put(tensor.clone())

    def receive(self, rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        tensor = self.queues[rank].get(timeout=30)
        assert (tuple(tensor.shape), tensor.dtype) == (shape, dtype)
        return tensor


def _rank0_load(path: Path, tp: int, dtype: DType) -> tuple[list[Tensors], int]:
    """All ranks' tensors, each rank a thread, and the bytes that rank 0 read."""
    model, source = open_checkpoint(path)
    mail = Mailbox(tp)
    loaded: list[Tensors] = [{} for _ in range(tp)]

    def work(rank: int) -> None:
        loaded[rank].update(
            rank0_shards(
                source if rank == 0 else None,
                model,
                tp,
                rank,
                send=mail.send,
                recv=lambda shape, dtype: mail.receive(rank, shape, dtype),
                dtype=dtype,
            )
        )

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(tp)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
        assert not thread.is_alive()
    assert all(box.empty() for box in mail.queues)
    return loaded, source.bytes_read


@pytest.mark.parametrize(("family", "tp"), [("qwen2", 1), ("qwen2", 4), ("llama", 8), ("qwen3", 2)])
def test_rank0_gives_every_rank_what_it_would_have_read_itself(family: str, tp: int, tmp_path: Path) -> None:
    path = tiny_checkpoint(tmp_path, family)
    loaded, bytes_read = _rank0_load(path, tp, "bfloat16")
    model, source = open_checkpoint(path)
    for rank in range(tp):
        _equal(loaded[rank], dict(shards_of(source, model, tp, rank, dtype="bfloat16")))
    once = sum(torch.Size(shape).numel() for shape in shards.parameters(model).values())
    assert bytes_read == 4 * once  # replicas are sent again, not read again


def test_rank0_skips_empty_shards_on_both_sides(tmp_path: Path) -> None:
    path = tiny_checkpoint(tmp_path, "llama", vocab_size=5)
    loaded, _ = _rank0_load(path, 4, "float32")
    assert [len(tensors["lm_head.weight"]) for tensors in loaded] == [2, 2, 1, 0]


def test_only_rank0_has_the_source(tmp_path: Path) -> None:
    model, source = open_checkpoint(tiny_checkpoint(tmp_path, "llama"))
    mail = Mailbox(2)

    def receive(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return mail.receive(0, shape, dtype)

    for rank, given in [(0, None), (1, source)]:
        with pytest.raises(ValueError, match=f"rank {rank} .* source"):
            rank0_shards(given, model, 2, rank, send=mail.send, recv=receive, dtype="float32")


def _poisoned(path: Path, model: ModelConfig, tp: int, rank: int) -> Iterator[str]:
    """Overwrite every byte of the checkpoint that is not the rank's with NaN; yields the names touched."""
    tensors = load_file(path / "model.safetensors")
    for name, tensor in tensors.items():
        plan = shards.plan(name, model, tp, rank)
        if plan.dim is None:
            continue
        mine = tensor.narrow(plan.dim, plan.span.start, plan.span.size).clone()
        tensor.fill_(float("nan")).narrow(plan.dim, plan.span.start, plan.span.size).copy_(mine)
        yield name
    save_file(tensors, path / "model.safetensors")


@pytest.mark.parametrize("rank", range(4))
def test_the_other_ranks_bytes_do_not_reach_a_rank(rank: int, tmp_path: Path) -> None:
    path = tiny_checkpoint(tmp_path, "qwen2")
    model, source = open_checkpoint(path)
    expected = dict(shards_of(source, model, 4, rank, dtype="float32"))
    assert len(list(_poisoned(path, model, 4, rank))) > 20
    model, source = open_checkpoint(path)
    _equal(dict(shards_of(source, model, 4, rank, dtype="float32")), expected)


def test_the_real_stories260k_fits_its_configuration() -> None:
    path = Path(__file__).parents[4] / "shared" / "data" / "stories260K"
    if not path.is_dir():
        pytest.skip("stories260K is not beside the repository")
    model, source = open_checkpoint(path)
    verify(source, model)
    whole = load_file(path / "model.safetensors")
    for rank in range(4):
        _equal(dict(shards_of(source, model, 4, rank, dtype="float32")), _cut(whole, model, 4, rank))
