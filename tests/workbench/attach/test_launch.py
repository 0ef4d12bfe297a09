"""A command under the tap: what its ranks leave, and what is reported where none does."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from lockstep.workbench.attach.launch import Attached, AttachError, TapRequest, attach, how_it_ended
from lockstep.workbench.foreign.readers.lockstep import LockstepDump
from tests.checkpoints import tiny_checkpoint

PROGRAM = Path(__file__).parent / "transformers_program.py"


def report(kind: str, text: str) -> list[str]:
    """A command that reports as a process of an engine does."""
    line = f'{{"kind": "{kind}", "text": "{text}"}}'
    return ["sh", "-c", f"mkdir -p $LOCKSTEP_TAP; echo '{line}' > $LOCKSTEP_TAP/report-1.jsonl; exit 9"]


@pytest.fixture(scope="module")
def transformers_run(tmp_path_factory: pytest.TempPathFactory) -> Attached:
    """A program that generates with transformers, attached to."""
    model = tiny_checkpoint(tmp_path_factory.mktemp("model"), "qwen2")
    command = [sys.executable, str(PROGRAM), str(model), "1,2,3"]
    return attach(command, tmp_path_factory.mktemp("attached") / "dump", TapRequest(steps=2))


@pytest.mark.slow
def test_a_run_of_transformers_is_recorded(
    transformers_run: Attached, capfd: pytest.CaptureFixture[str]
) -> None:
    assert (transformers_run.code, transformers_run.ranks, transformers_run.failures) == (0, (0,), ())
    assert transformers_run.changed == ("torch.compile is switched off",)
    dump = LockstepDump.open(transformers_run.dump)
    assert dump.facts.source.startswith("transformers ")
    first, *decode = dump.passes(0)
    assert (first.ids, first.positions) == ((1, 2, 3), (0, 1, 2))
    assert [one.positions for one in decode] == [(3,), (4,)]  # two steps of the three that ran
    names = [one.tap for one in first.tensors]
    assert {"embed", "layers.0.attn.k_rope", "layers.1.mlp.down", "final_norm", "logits"} <= set(names)


@pytest.mark.parametrize(
    ("command", "reported"),
    [
        (["sh", "-c", "exit 4"], "no rank wrote a pass: the command ended with exit code 4; it imported no vLLM"),
        (["sh", "-c", "kill -KILL $$"], "the command was ended by SIGKILL"),
        (report("found", "nanovllm.engine"), "it imported nanovllm.engine, but called no model"),
        (report("failed", "tapping: KeyError: 3\\\\nTraceback"), "exit code 9; tapping: KeyError: 3"),
        (["/no/such/command"], "cannot start /no/such/command: No such file or directory"),
        (["no-such-engine"], "cannot start no-such-engine: there is no such command on the PATH: is the engine's"),
    ],
)  # fmt: skip
def test_where_nothing_was_recorded_it_is_reported_why(
    command: list[str], reported: str, tmp_path: Path
) -> None:
    with pytest.raises(AttachError) as error:
        attach(command, tmp_path / "dump", TapRequest())
    assert reported in str(error.value)
    assert "Traceback" not in str(error.value)


def test_how_a_command_ended_in_words() -> None:
    assert [how_it_ended(code) for code in (0, 2, -9)] == [
        "",
        "ended with exit code 2",
        "was ended by SIGKILL",
    ]
