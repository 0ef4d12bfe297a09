"""Estimates of memory against what ranks hand over and hold at their height, and what is refused by them."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from lockstep.engine.config import EngineConfig, ModelConfig
from lockstep.engine.errors import RequestError
from lockstep.engine.peaks import peak_of, start_over
from lockstep.engine.ranks.client import Client
from lockstep.engine.ranks.messages import AddSequence, RemoveSequence, RunStep, WatchTaps
from lockstep.engine.run.estimates import (
    LeftBehind,
    attention_bytes,
    captured_bytes,
    check_room,
    kept_run_bytes,
    largest_passes,
    working_bytes,
)
from lockstep.engine.run.memory import check_loadable
from lockstep.engine.taps.names import model_taps
from tests.checkpoints import tiny_checkpoint

WIDE = {
    "hidden_size": 256, "intermediate_size": 768, "num_attention_heads": 8, "num_key_value_heads": 8,
    "max_position_embeddings": 4096, "vocab_size": 2000,
}  # fmt: skip


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("wide"), "llama", **WIDE)


def prompt(tokens: int) -> list[int]:
    return [i % 2000 for i in range(tokens)]


def last_pass(client: Client, tokens: int) -> tuple[int, list[int]]:
    """Bytes captured in the pass that ends a prompt, and the growth of each rank at its height until then."""
    client.call(AddSequence(0, prompt(16)))
    client.call(RunStep())
    client.call(RemoveSequence(0))
    client.call(AddSequence(0, prompt(tokens)))
    before = [psutil.Process(pid).memory_info().rss for pid in client.pids]
    for pid in client.pids:
        start_over(pid)
    emitted = None
    while emitted is None:
        reports = client.call(RunStep())
        emitted = reports[0].sequences[0].emitted
    captured = sum(one.value.array.nbytes for report in reports for one in report.tensors)
    return captured, [peak_of(pid) - rss for pid, rss in zip(client.pids, before, strict=True)]


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("tp", "tokens", "chunk"), [(1, 512, None), (2, 512, None), (1, 768, 256)], ids=["one", "two", "chunks"]
)
def test_what_is_captured_is_known_and_what_a_rank_holds_is_estimated(
    tp: int, tokens: int, chunk: int | None, wide: Path
) -> None:
    config = EngineConfig(tp=tp, threads=1, max_tokens=tokens + 8, max_sequences=1, chunk_tokens=chunk)
    model = check_loadable(wide, config)
    places = range(len(model_taps(model, tp)))
    sizes = largest_passes([tokens], chunk)
    with Client(config, program="lockstep.engine.ranks") as client:
        client.load(wide)
        client.call(WatchTaps(False, list(places), []))
        captured, grown = last_pass(client, tokens)
    assert captured == captured_bytes(model, config, LeftBehind(full=places), sizes)
    expected = captured / tp + working_bytes(model, config, sizes) + attention_bytes(model, config, sizes)
    for one in grown:
        assert one / 1.3 <= expected <= one * 1.3


def test_a_bare_pass_is_estimated(wide: Path) -> None:
    """By the lesser of two ranks: how the allocator cuts memory up is not the pass's."""
    config = EngineConfig(threads=1, max_tokens=2064, max_sequences=1)
    model, heights = check_loadable(wide, config), []
    for _ in range(2):
        with Client(config, program="lockstep.engine.ranks") as client:
            client.load(wide)
            heights += last_pass(client, 2048)[1]
    grown = min(heights)
    assert grown / 1.3 <= working_bytes(model, config, largest_passes([2048], None)) <= grown * 1.3


def test_the_last_rows_of_attention_take_no_more_than_they_may(variant_model: ModelConfig) -> None:
    specs = [spec.name for spec in model_taps(variant_model, 1)]
    probs = [i for i, name in enumerate(specs) if name.endswith("attn.probs")]
    sizes, config = largest_passes([200], None), EngineConfig()
    whole = captured_bytes(variant_model, config, LeftBehind(full=probs), sizes)
    rows = captured_bytes(variant_model, config, LeftBehind(last=probs), sizes)
    assert rows == whole // 200
    assert captured_bytes(variant_model, config, LeftBehind(last=probs, rows_bytes=1 << 40), sizes) == whole
    limited = captured_bytes(variant_model, config, LeftBehind(last=probs, rows_bytes=1 << 10), sizes)
    assert limited == rows + (2 << 10)  # float16 as it is counted, float32 as it is handed over


def test_a_run_in_chunks_leaves_as_many_rows_as_a_whole_one(variant_model: ModelConfig) -> None:
    """But of scores and probabilities, whose earlier rows then have fewer keys, and of caches, which come each time."""
    specs = model_taps(variant_model, 1)
    plain = [i for i, spec in enumerate(specs) if spec.name.endswith(("mlp.act", "q_rope", "attn_norm"))]
    whole, chunks = (
        kept_run_bytes(variant_model, EngineConfig(chunk_tokens=chunk), LeftBehind(full=plain), [50, 7], 3)
        for chunk in (None, 8)
    )
    assert whole == chunks


@pytest.fixture
def variant_model(tmp_path: Path) -> ModelConfig:
    return check_loadable(tiny_checkpoint(tmp_path, "qwen2"), EngineConfig())


def test_what_would_not_fit_is_refused_with_what_would(
    variant_model: ModelConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Scores whole of 200 tokens: in chunks they fit."""
    memory, swap = psutil.virtual_memory(), psutil.swap_memory()._replace(free=0)
    monkeypatch.setattr(psutil, "swap_memory", lambda: swap)

    def free(size: int) -> None:
        monkeypatch.setattr(psutil, "virtual_memory", lambda: memory._replace(available=size))

    wanted = LeftBehind(full=range(len(model_taps(variant_model, 1))))
    config = EngineConfig(max_tokens=210, max_sequences=1)
    free(1 << 40)
    check_room(variant_model, config, [200], wanted)
    free(14 << 20)
    with pytest.raises(
        RequestError, match=r"200 tokens in float32 takes about .*captured tensors.*14.0 MiB are free"
    ):
        check_room(variant_model, config, [200], wanted, loaded=True)
    with pytest.raises(RequestError, match="--chunk 100 would fit"):
        check_room(variant_model, config, [200], wanted, loaded=True)
    free(1 << 10)
    with pytest.raises(RequestError, match="use --chunk N, fewer taps"):
        check_room(variant_model, config, [200], wanted)
    check_room(
        variant_model, EngineConfig(listen="localhost:29600"), [200], wanted
    )  # its ranks are elsewhere
