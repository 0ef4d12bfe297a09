"""The installers on stand-ins for their engines: which calls of the model are passes, and whose rows they hold."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from lockstep.workbench.attach.inside import lockstep_nano, lockstep_report, lockstep_sglang, lockstep_vllm
from tests.workbench.attach import stand_ins
from tests.workbench.attach.stand_ins import ForwardBatch, ForwardMode, NanoSequence, Rows

TAPS = ["embed", "layers.0.attn_norm", "logits"]


@pytest.fixture
def dump(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder that the installers write to."""
    monkeypatch.setenv("LOCKSTEP_TAP", str(tmp_path))
    monkeypatch.setattr(lockstep_report, "_reported", set())
    for name in ("ONLY", "STEPS", "CAPTURE"):
        monkeypatch.delenv(f"LOCKSTEP_TAP_{name}", raising=False)
    return tmp_path


def passes(dump: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (dump / "rank0" / "passes.jsonl").read_text().splitlines()]


def taps(one: dict[str, Any]) -> list[str]:
    return [tap["name"] for tap in one["taps"]]


def remarks(dump: Path) -> list[tuple[str, str]]:
    lines = [line for file in dump.glob("report-*.jsonl") for line in file.read_text().splitlines()]
    return [(one["kind"], one["text"].splitlines()[0]) for one in map(json.loads, lines)]


def vllm(monkeypatch: pytest.MonkeyPatch, worker: stand_ins.WorkerV1) -> stand_ins.WorkerWrapperBase:
    """A worker in its wrapper, as the shim finds it."""
    parallel_state = SimpleNamespace(get_tp_group=lambda: SimpleNamespace(rank_in_group=0, world_size=1))
    distributed = ModuleType("vllm.distributed")
    distributed.parallel_state = parallel_state  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "vllm", ModuleType("vllm"))
    monkeypatch.setitem(sys.modules, "vllm.distributed", distributed)
    wrapper = type("WorkerWrapperBase", (stand_ins.WorkerWrapperBase,), {})
    lockstep_vllm.vllm_worker(SimpleNamespace(WorkerWrapperBase=wrapper))
    return wrapper(worker)


def test_vllm_runs_eager_and_keeps_its_prefix_cache(dump: Path) -> None:
    args = type("EngineArgs", (stand_ins.EngineArgs,), {})
    lockstep_vllm.vllm_arguments(SimpleNamespace(EngineArgs=args))
    reported = args(enable_prefix_caching=True).create_engine_config()
    assert reported == {"enforce_eager": True, "enable_prefix_caching": True, "max_num_seqs": 256}
    args(enforce_eager=True).create_engine_config()
    assert remarks(dump) == [("changed", "vLLM runs with enforce_eager=True")]


@pytest.mark.parametrize(
    ("config", "why"),
    [
        ({"kv_transfer_config": object()}, "a KV transfer fills the cache"),
        ({"speculative_config": object()}, "what is computed is known after the draft is judged"),
        (
            {"model_config": SimpleNamespace(uses_mrope=True)},
            "positions are no places in the request (M-RoPE)",
        ),
        (
            {"model_config": SimpleNamespace(is_hybrid=True)},
            "states of linear attention come from the prefix cache too",
        ),
        ({"use_v2_model_runner": True}, "model runner V2"),
    ],
)
def test_a_prefix_cache_that_cannot_be_followed_is_switched_off(
    config: dict[str, object], why: str, dump: Path
) -> None:
    class Args(stand_ins.EngineArgs):
        def create_engine_config(self) -> Any:
            cache = SimpleNamespace(enable_prefix_caching=self.enable_prefix_caching)
            return SimpleNamespace(cache_config=cache, **config)

    lockstep_vllm.vllm_arguments(SimpleNamespace(EngineArgs=Args))
    made = Args(enforce_eager=True, enable_prefix_caching=True).create_engine_config()
    assert not made.cache_config.enable_prefix_caching
    assert remarks(dump) == [("changed", f"vLLM runs with enable_prefix_caching=False: {why}")]


def test_vllm_is_asked_for_a_variant_of_the_run(dump: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = {"max_num_seqs": 1, "enable_prefix_caching": True, "of_a_later_release": 3}
    monkeypatch.setenv("LOCKSTEP_TAP_ARGUMENTS", json.dumps(wanted))
    args = type("EngineArgs", (stand_ins.EngineArgs,), {})
    lockstep_vllm.vllm_arguments(SimpleNamespace(EngineArgs=args))
    reported = args(enforce_eager=True).create_engine_config()
    assert (reported["max_num_seqs"], reported["enable_prefix_caching"]) == (1, True)
    assert remarks(dump) == [
        ("changed", "vLLM runs with max_num_seqs=1"),
        ("changed", "vLLM runs with enable_prefix_caching=True"),
    ]


class Scheduler:
    """Of vLLM, as far as preempting goes: each step each running request decodes a token."""

    def __init__(self, *names: str) -> None:
        self.running = [SimpleNamespace(request_id=name, num_output_tokens=0) for name in names]
        self.resets: list[list[str]] = []

    def reset_prefix_cache(self, reset_running_requests: bool = False) -> bool:
        assert reset_running_requests
        self.resets.append([one.request_id for one in self.running])
        return True

    def schedule(self) -> str:
        for one in self.running:
            one.num_output_tokens += 1
        return "scheduled"


@pytest.mark.parametrize("asked", [True, False])
def test_requests_of_vllm_are_preempted_once_each(
    asked: bool, dump: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if asked:
        monkeypatch.setenv("LOCKSTEP_TAP_ARGUMENTS", json.dumps({"preempted_after": 2}))
    kind = type("Scheduler", (Scheduler,), {})
    lockstep_vllm.vllm_scheduler(SimpleNamespace(Scheduler=kind))
    scheduler = kind("a", "b")
    assert [scheduler.schedule() for _ in range(4)] == ["scheduled"] * 4
    scheduler.running.append(SimpleNamespace(request_id="c", num_output_tokens=0))
    for _ in range(4):
        scheduler.schedule()
    assert scheduler.resets == ([["a", "b"], ["a", "b", "c"]] if asked else [])
    assert len(remarks(dump)) == asked


def test_scheduled_batches_of_vllm_are_passes(dump: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    worker = stand_ins.WorkerV1(stand_ins.ToyModel())
    wrapper = vllm(monkeypatch, worker)
    model = worker.get_model()
    model(input_ids=torch.zeros(8, dtype=torch.long), positions=torch.zeros(8))  # profiling
    wrapper.execute_model(Rows({}))  # nothing to do
    assert wrapper.execute_model(Rows({"a": [3, 4], "b": [5]}, padding=2)) == "done"
    wrapper.execute_model(Rows({"a": [6]}, start=2))
    model(input_ids=torch.zeros(8, dtype=torch.long), positions=torch.zeros(8))  # an idle pass
    first, second = passes(dump)
    assert (first["ids"], first["positions"]) == ([5, 3, 4, 0, 0], [0, 0, 1, 0, 0])
    assert first["requests"] == ["b", "a", "a", "", ""]
    assert (second["ids"], second["positions"], second["requests"]) == ([6], [2], ["a"])
    assert taps(first) == taps(second) == TAPS
    tensors = load_file(dump / "rank0" / first["file"])
    embed = model.model.embed_tokens.weight[[5, 3, 4, 0, 0]]
    assert torch.equal(tensors["0"], embed)
    assert torch.equal(tensors["2"], embed[[0, 2]] @ torch.ones(4, stand_ins.VOCAB))


def test_a_failed_batch_of_vllm_is_kept_and_marked(dump: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wrapper = vllm(monkeypatch, stand_ins.WorkerV1(stand_ins.ToyModel()))
    with pytest.raises(RuntimeError, match="out of memory"):
        wrapper.execute_model(Rows({"fail": [3]}))
    assert [one["raised"] for one in passes(dump)] == ["RuntimeError: out of memory"]


def test_logits_of_model_runner_v2_come_with_sampling(dump: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    worker = stand_ins.WorkerV2(stand_ins.ToyModel())
    wrapper = vllm(monkeypatch, worker)
    assert wrapper.execute_model(Rows({"long": [3, 4, 5], "short": [6]})) is None
    assert wrapper.sample_tokens(None) == "sampled"
    assert wrapper.execute_model(Rows({"long": [7]}, start=3)) is None
    assert wrapper.sample_tokens(None) == "sampled"
    first, second = passes(dump)
    assert (first["ids"], first["requests"]) == ([6, 3, 4, 5], ["short", "long", "long", "long"])
    assert taps(first) == taps(second) == TAPS


def test_recording_stops_after_the_steps_asked_for(dump: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCKSTEP_TAP_STEPS", "1")
    monkeypatch.setenv("LOCKSTEP_TAP_ONLY", "logits\nnothing.*")
    worker = stand_ins.WorkerV1(stand_ins.ToyModel())
    wrapper = vllm(monkeypatch, worker)
    wrapper.execute_model(Rows({"a": [3, 4]}))
    for position in range(2, 5):
        assert wrapper.execute_model(Rows({"a": [5]}, start=position)) == "done"
    assert [one["positions"] for one in passes(dump)] == [[0, 1], [2]]
    assert taps(passes(dump)[0]) == ["logits"]
    assert not worker.get_model()._forward_pre_hooks
    assert "sample_tokens" not in vars(worker)


def test_an_engine_that_cannot_be_tapped_goes_on(
    dump: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    worker = stand_ins.WorkerV1(stand_ins.ToyModel())
    worker.vllm_config.parallel_config.pipeline_parallel_size = 2
    wrapper = vllm(monkeypatch, worker)
    assert [wrapper.execute_model(Rows({"a": [3]})) for _ in range(2)] == ["done", "done"]
    reported = "tapping a vLLM worker: RuntimeError: pipeline parallelism is not recorded: use tensor parallelism alone"
    assert remarks(dump) == [("failed", reported)]
    assert capsys.readouterr().err == f"lockstep attach: {reported} (the engine goes on)\n"


def test_forward_batches_of_sglang_are_passes(dump: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    distributed = ModuleType("sglang.srt.distributed")
    distributed.get_tensor_model_parallel_rank = lambda: 0  # type: ignore[attr-defined]
    distributed.get_tensor_model_parallel_world_size = lambda: 1  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "sglang", ModuleType("sglang"))
    monkeypatch.setitem(sys.modules, "sglang.srt", ModuleType("sglang.srt"))
    monkeypatch.setitem(sys.modules, "sglang.srt.distributed", distributed)
    installers = lockstep_sglang
    args = type("ServerArgs", (stand_ins.ServerArgs,), {})
    installers.sglang_arguments(SimpleNamespace(ServerArgs=args))
    assert (args(model_path="toy").disable_cuda_graph, args().disable_radix_cache) == (True, True)
    kind = type("ModelRunner", (stand_ins.SGLangRunner,), {})
    installers.sglang_runner(SimpleNamespace(ModelRunner=kind))
    runner = kind()
    extend = ForwardBatch(
        forward_mode=ForwardMode("extend"), req_pool_indices=torch.tensor([7, 2]), extend_seq_lens_cpu=[2, 1],
        input_ids=torch.tensor([3, 4, 5, 0]), positions=torch.tensor([0, 1, 0, 0]),
    )  # fmt: skip
    decode = ForwardBatch(
        forward_mode=ForwardMode("decode"),
        rids=["x"],
        input_ids=torch.tensor([6]),
        positions=torch.tensor([2]),
    )
    idle = ForwardBatch(
        forward_mode=ForwardMode("idle"), input_ids=torch.tensor([0]), positions=torch.tensor([0])
    )
    for batch in (extend, decode, idle):
        runner.forward(batch)
    runner.model.forward(torch.tensor([0]), torch.tensor([0]))  # a graph is captured
    assert [one["requests"] for one in passes(dump)] == [["7", "7", "2", ""], ["x"]]
    assert [taps(one) for one in passes(dump)] == [TAPS] * 2


def test_runs_of_nano_vllm_are_passes(dump: Path) -> None:
    kind = type("ModelRunner", (stand_ins.NanoRunner,), {})
    lockstep_nano.nano_runner(SimpleNamespace(ModelRunner=kind))
    config = SimpleNamespace(enforce_eager=False, hf_config={"num_key_value_heads": 1}, model="toy")
    runner = kind(config, 0)
    assert config.enforce_eager
    one, two = NanoSequence(5, [3, 4, 5], num_cached_tokens=1), NanoSequence(6, [7])
    runner.run([one, two], True)
    runner.run([one, two], False)
    first, second = passes(dump)
    assert (first["ids"], first["requests"]) == ([4, 5, 7], ["5", "5", "6"])
    assert (second["ids"], second["requests"]) == ([5, 7], ["5", "6"])
    assert (first["places"], second["places"]) == ([1, 2, 0], [2, 0])
    assert taps(first) == taps(second) == TAPS


def test_sequences_that_nano_vllm_sent_to_another_rank_have_no_number(dump: Path) -> None:
    kind = type("ModelRunner", (stand_ins.NanoRunner,), {})
    lockstep_nano.nano_runner(SimpleNamespace(ModelRunner=kind))
    runner = kind(SimpleNamespace(enforce_eager=True, hf_config={"num_key_value_heads": 1}, model="toy"), 0)
    one = NanoSequence(5, [3, 4, 5])
    del one.seq_id
    runner.run([one], True)
    (only,) = passes(dump)
    assert (only["ids"], only["requests"]) == ([3, 4, 5], None)


def test_ids_alone_leave_engines_as_they_are(dump: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCKSTEP_TAP_CAPTURE", "ids")
    args = type("EngineArgs", (stand_ins.EngineArgs,), {})
    lockstep_vllm.vllm_arguments(SimpleNamespace(EngineArgs=args))
    args().create_engine_config()
    assert remarks(dump) == []
    worker = stand_ins.WorkerV1(stand_ins.ToyModel())
    vllm(monkeypatch, worker).execute_model(Rows({"a": [3, 4], "b": [5]}))
    (only,) = passes(dump)
    assert (only["ids"], only["requests"], only["taps"]) == ([5, 3, 4], ["b", "a", "a"], [])


def test_ids_alone_of_nano_vllm_are_those_of_its_batches(dump: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a CUDA graph runs, nothing calls the model."""
    monkeypatch.setenv("LOCKSTEP_TAP_CAPTURE", "ids")
    kind = type("ModelRunner", (stand_ins.NanoRunner,), {})
    lockstep_nano.nano_runner(SimpleNamespace(ModelRunner=kind))
    config = SimpleNamespace(enforce_eager=False, hf_config={"num_key_value_heads": 1}, model="toy")
    runner = kind(config, 0)
    one, two = NanoSequence(5, [3, 4, 5], num_cached_tokens=1), NanoSequence(6, [7])
    runner.run([one, two], True)
    runner.run([one, two], False)
    assert not config.enforce_eager
    first, second = passes(dump)
    assert (first["ids"], first["positions"], first["requests"]) == ([4, 5, 7], [1, 2, 0], ["5", "5", "6"])
    assert (second["ids"], second["positions"], second["taps"]) == ([5, 7], [2, 0], [])
