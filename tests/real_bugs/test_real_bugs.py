"""The table of real bugs: that it is whole, and a few of its rows, on transformers in this process."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from transformers import PreTrainedModel, masking_utils, modeling_utils
from transformers.integrations import accelerate
from transformers.models.llama import modeling_llama

import lockstep
from lockstep.workbench.attach.inside import lockstep_report, lockstep_transformers
from lockstep.workbench.foreign.importing import import_run
from lockstep.workbench.foreign.readers.lockstep import LockstepDump
from tests.real_bugs import page
from tests.real_bugs.bugs import HERE, bugs, controls, drawn, held_out
from tests.real_bugs.gguf_bugs import BUGS as IN_THE_FILE
from tests.real_bugs.models import MODELS, checkpoint
from tests.real_bugs.results import Results, readings


@pytest.fixture
def programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The modules of the engines' programs can be imported."""
    for folder in ("programs", "plugin"):
        monkeypatch.syspath_prepend(str(HERE / folder))


@pytest.fixture
def of_transformers(programs: None) -> ModuleType:
    import real_bugs_of_transformers

    return real_bugs_of_transformers


def test_every_row_is_put_back_by_the_function_of_its_name(of_transformers: ModuleType) -> None:
    import real_bugs_of_vllm

    known = {"transformers": of_transformers.BUGS, "vllm": real_bugs_of_vllm.BUGS, "gguf": IN_THE_FILE}
    for one in bugs().values():
        if one.engine in known:
            assert one.name in known[one.engine]
        else:
            assert f"def {one.name}(" in (HERE / "programs" / "run_nano.py").read_text()
        assert one.model in MODELS
    import second_bugs_of_vllm

    changes = {"transformers": of_transformers.CHANGES, "vllm": second_bugs_of_vllm.CHANGES}
    for one in controls().values():
        assert one.model in MODELS
        assert not one.change or one.change in changes[one.engine]


def test_half_of_them_is_set_aside_by_lot() -> None:
    assert held_out() == set(drawn([name for name, one in bugs().items() if one.set == "first"]))


@pytest.mark.parametrize("of_set", ["first", "fresh", "second", "third"])
def test_no_kind_has_the_table_for_itself(of_set: str) -> None:
    """At most a sixth of RoPE and of windows each; at least an eighth of caches, of precision and on two ranks."""
    rows = [one for one in bugs().values() if one.set == of_set]
    kinds = Counter(one.kind for one in rows)
    assert max(kinds["rope"], kinds["window"]) <= len(rows) / 6
    assert min(kinds["cache"], kinds["precision"], sum(one.ranks > 1 for one in rows)) >= len(rows) / 8


def test_what_was_read_was_run() -> None:
    results = Results.load()
    assert set(results.rows) <= set(bugs())
    for ran, read in ((results.rows, readings()), (results.first, readings("first_look.toml"))):
        for name, reading in read.items():
            found = ran[name].verdict == "diverged" or page.noted(bugs()[name], ran[name], results)
            assert found or reading.named == "missed", name


def test_the_page_is_made_of_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = page.PAGE.read_text()
    monkeypatch.setattr(page, "PAGE", tmp_path / "real-bugs.md")
    page.write(Results.load())
    assert page.PAGE.read_text() == kept, "make real-bugs, or python -m tests.real_bugs.run --page"


@pytest.fixture
def dump(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The installer of attach has run in this process, and writes there."""
    monkeypatch.setenv("LOCKSTEP_TAP", str(tmp_path / "dump"))
    monkeypatch.setattr(lockstep_report, "_reported", set())
    monkeypatch.setattr(PreTrainedModel, "__call__", PreTrainedModel.__call__)
    try:
        lockstep_transformers.transformers_models(SimpleNamespace(PreTrainedModel=PreTrainedModel))
        yield tmp_path / "dump"
    finally:
        torch.compiler.set_stance("default")


#: Bug -> what it replaces, and what is reported of it.
HERE_AND_NOW: dict[str, tuple[object, str, str]] = {
    "window_one_wider": (masking_utils, "sliding_window_overlay", "the window of 8 is one token too wide"),
    "dynamic_rope_never_reset": (
        modeling_llama.LlamaRotaryEmbedding,
        "__setattr__",
        "rope_theta is 36600.9 instead",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("bug", ["", *HERE_AND_NOW])
@pytest.mark.parametrize("model", ["gemma2", "llama-dynamic"])
def test_a_row_in_this_process(
    bug: str,
    model: str,
    dump: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    of_transformers: ModuleType,
) -> None:
    if bug and bugs()[bug].model != model:
        pytest.skip("another model's")
    for module in (modeling_utils, accelerate):  # to be put back: the program states that it is there
        monkeypatch.setattr(module, "is_accelerate_available", module.is_accelerate_available)
    stated = ""
    if bug:
        owner, name, stated = HERE_AND_NOW[bug]
        monkeypatch.setattr(owner, name, getattr(owner, name))  # to be put back
        put: Callable[[], None] = of_transformers.BUGS[bug]
        put()
    run: ModuleType = __import__("run_transformers")
    path = checkpoint(tmp_path, model)
    monkeypatch.setattr(sys, "argv", ["run_transformers.py", str(path), "1"])
    run.main()
    import_run(LockstepDump.open(dump), tmp_path / "run.session", form="lockstep")
    verdict = lockstep.check(tmp_path / "run.session", model=path)
    assert verdict.matches == (not bug), str(verdict)
    assert not bug or any(stated in one.text for one in verdict.event.causes)
