"""Every fault of the catalogue, on a tiny model that it can act on, is named from what was recorded."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from lockstep.engine.config import EngineConfig, ModelConfig
from lockstep.engine.faults.catalogue import FAULTS
from lockstep.workbench.checking.forced_run import check, record_reference
from lockstep.workbench.checking.pipeline import CheckResult
from lockstep.workbench.inferior.inferior import Inferior
from lockstep.workbench.models.capture import FULL
from lockstep.workbench.models.opening import open_model
from tests.checkpoints import VARIANTS, tiny_checkpoint, tiny_config
from tests.gguf_twins import gguf_twin
from tests.workbench.checking.test_families import (
    PLANTED,
    PLANTED_IN_EXPERTS,
    PLANTED_IN_GEMMA4,
    PLANTED_IN_MAMBA,
    PLANTED_IN_STATES,
)

TP, STEPS = 2, 4
PROMPTS = [[3, 130, 17, 99, 4, 64, 5, 12, 77, 120, 31, 8, 56], [3, 130, 17, 99, 4]]
#: Family and overrides of models beside `VARIANTS`.
OTHERS = {
    "qwen2-epsilon": ("qwen2", {"rms_norm_eps": 1e-6}),
    "llama-gguf": ("llama", {"attention_bias": True}),
}
MODELS = ("qwen2-tied", "qwen3", "llama-bias", "qwen2-window", "llama-yarn", *OTHERS)
#: Where 1/sqrt(hidden_size) is not 1/head_dim as well.
ELSEWHERE: Mapping[str, str] = {"scale=hidden": "qwen3"}
#: What does nothing to the numbers at this parallelism: a note, not a cause.
SILENT = ("cache_heads=repeated",)


@cache
def config(name: str) -> ModelConfig:
    family, overrides = (VARIANTS | OTHERS)[name]
    found = ModelConfig.from_hf(tiny_config(family, **overrides).to_dict())
    return replace(found, block_types=("F32", "Q4_1")) if name.endswith("gguf") else found


def written(folder: Path, name: str) -> Path:
    """The model's checkpoint, made in a new folder."""
    folder.mkdir(parents=True)
    family, overrides = (VARIANTS | OTHERS)[name]
    path = tiny_checkpoint(folder, family, **overrides)
    keys = {"tokenizer.ggml.model": "none"}
    return gguf_twin(path, folder / "tiny.gguf", "Q4_1", keys=keys) if name.endswith("gguf") else path


def cases() -> Iterator[tuple[str, str]]:
    """(fault, model), model by model, of all faults that can act on one of them."""
    found: dict[str, str] = {}
    for fault in FAULTS:
        key = f"{fault.seam}={fault.value}"
        able = [name for name in MODELS if fault.needs(config(name), TP) is None]
        if able:
            found[key] = ELSEWHERE.get(key, able[0])
    yield from sorted(found.items(), key=lambda case: MODELS.index(case[1]))


@pytest.fixture(scope="module")
def diagnosed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str, str], CheckResult]]:
    """(fault, model) -> the check under it. One engine serves all faults of a model."""
    root, stack, running = tmp_path_factory.mktemp("catalogue"), ExitStack(), {}

    def run(fault: str, name: str) -> CheckResult:
        if name not in running:
            stack.close()
            running.clear()
            model = open_model(str(written(root / name, name)))
            engine = EngineConfig(tp=TP, max_tokens=64, threads=1)
            inferior = stack.enter_context(Inferior(model.path, model.config, engine, capture=FULL))
            running[name] = inferior, record_reference(model.path, PROMPTS, STEPS, "float32")
        rule, _, value = fault.partition("=")
        return check(*running[name], root / "run.session", rules={rule: value})

    with stack:
        yield run


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(("fault", "model"), cases())
def test_a_fault_is_named(fault: str, model: str, diagnosed: Callable[[str, str], CheckResult]) -> None:
    result = diagnosed(fault, model)
    if fault in SILENT:
        assert result.matches
        assert any("no effect" in note for note in result.event.notes)
        return
    assert result.event.verdict == "diverged"
    reported = [cause.in_words() for cause in result.causes]
    assert fault in {cause.fault for cause in result.causes}, reported


def test_all_of_the_catalogue_is_tried() -> None:
    """Here, or on the family that has the part in which it acts."""
    elsewhere = {fault for _, fault in (*PLANTED, *PLANTED_IN_EXPERTS)}
    elsewhere |= PLANTED_IN_STATES.keys() | PLANTED_IN_GEMMA4.keys() | PLANTED_IN_MAMBA.keys()
    assert {fault for fault, _ in cases()} | elsewhere == {f"{one.seam}={one.value}" for one in FAULTS}
