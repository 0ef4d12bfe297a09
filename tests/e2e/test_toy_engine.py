"""docs/toy-engine.md is a walk that can be taken: its commands and changes, in their order, print what it shows."""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from tokenizers import Tokenizer

from lockstep.workbench.attach.tap_file import tap_file
from lockstep.workbench.demo import MODEL_DIR
from lockstep.workbench.foreign.readers.lockstep import LockstepDump
from lockstep.workbench.references.loading import load_golden
from tests.checkpoints import tiny_checkpoint

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "toy-engine.md").read_text(encoding="utf-8")
ENGINE = ROOT / "examples" / "toy_engine" / "engine.py"
QUESTION = (
    "<|im_start|>user\nWrite a haiku about rain with the word zorblat<|im_end|>\n<|im_start|>assistant\n"
)


def changed(text: str, diff: str) -> str:
    """`text` after one of the page's changes; what it replaces stands there once."""
    lines = diff.splitlines(keepends=True)
    old, new = ("".join(line[1:] for line in lines if line[0] in kept) for kept in (" -", " +"))
    assert text.count(old) == 1, f"{text.count(old)} times in the engine:\n{old}"
    return text.replace(old, new)


def changes(part: str) -> list[str]:
    """The page's changes under `<!-- part -->`."""
    found = re.search(rf"<!-- {part} -->\n((?:```diff\n.*?```\n)+)", PAGE, re.DOTALL)
    assert found is not None
    return re.findall(r"```diff\n(.*?)```", found[1], re.DOTALL)


def imported(folder: Path, *diffs: str) -> ModuleType:
    """The engine as the page has it after these changes."""
    text = ENGINE.read_text(encoding="utf-8")
    for diff in diffs:
        text = changed(text, diff)
    path = folder / "engine.py"
    path.write_text(text)
    spec = importlib.util.spec_from_file_location("toy_engine", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["toy_engine"] = module  # dataclasses look there
    spec.loader.exec_module(module)
    return module


def test_the_engine_is_right_but_for_its_bug(tmp_path: Path) -> None:
    """As the page leaves it, it computes what transformers computes; as it begins, it does not."""
    ids = Tokenizer.from_file(str(MODEL_DIR / "tokenizer.json")).encode(QUESTION).ids
    model = load_golden(MODEL_DIR, "float32", "cpu")
    with torch.no_grad():
        stated = model.generate(torch.tensor([ids]), max_new_tokens=24, do_sample=False)[
            0, len(ids) :
        ].tolist()
    fixed = imported(tmp_path, *changes("fix")).Engine(MODEL_DIR).generate(ids, 24)
    assert fixed == stated[: len(fixed)]
    assert len(fixed) == 20
    assert imported(tmp_path).Engine(MODEL_DIR).generate(ids, 4) != stated[:4]


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen3"])
def test_the_fixed_engine_reads_what_the_page_states(family: str, tmp_path: Path) -> None:
    path, ids = tiny_checkpoint(tmp_path / family, family), [5, 17, 99]
    with torch.no_grad():
        model = load_golden(path, "float32", "cpu")
        stated = model.generate(torch.tensor([ids]), max_new_tokens=4, do_sample=False, eos_token_id=None)
    engine = imported(tmp_path, *changes("fix")).Engine(path)
    engine.config.eos = set()
    assert engine.generate(ids, 4) == stated[0, len(ids) :].tolist()


def test_the_taps_of_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is recorded is what the engine computed: the rotation of neighbours, at their positions."""
    (tmp_path / "lockstep_tap.py").write_text(tap_file())
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    engine = imported(tmp_path, *changes("taps")).Engine(MODEL_DIR)
    engine.generate([5, 6, 7], 3)
    engine.tape.close()
    passes = list(LockstepDump.open(tmp_path / "dump").passes(0))
    assert [one.positions for one in passes] == [(0, 1, 2), (3,), (4,)]
    seen = {one.tap: one.array for one in passes[2].tensors}
    assert list(seen)[0::25] == ["embed", "logits"]
    assert seen["logits"].shape == (1, 2003)
    before, after = seen["layers.3.attn.q_proj"], seen["layers.3.attn.q_rope"]
    turned = (after[..., 0::2] + 1j * after[..., 1::2]) / (before[..., 0::2] + 1j * before[..., 1::2])
    expected = torch.exp(1j * 4 * 1e6 ** (-torch.arange(16) / 16)).numpy()
    torch.testing.assert_close(torch.tensor(turned[0, 0]), torch.tensor(expected), atol=1e-4, rtol=0)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_walk(tmp_path: Path) -> None:
    shutil.copytree(ENGINE.parent, tmp_path / "examples" / "toy_engine", ignore=shutil.ignore_patterns("__*"))
    (tmp_path / "workbench" / "demo").mkdir(parents=True)
    (tmp_path / "workbench" / "demo" / "model").symlink_to(MODEL_DIR)
    here = tmp_path
    for kind, text in re.findall(r"```(console|diff)\n(.*?)```", PAGE, re.DOTALL):
        if kind == "diff":
            engine = here / "engine.py"
            engine.write_text(changed(engine.read_text(), text))
            continue
        for block in re.split(r"^\$ ", text, flags=re.MULTILINE)[1:]:
            command, *shown = block.splitlines()
            if command.startswith("cd "):
                here /= command.removeprefix("cd ")
            else:
                printed = run(command, here, 1 if "verdict     diverged" in shown else 0)
                check_shown(shown, printed)


def run(command: str, here: Path, expected: int) -> list[str]:
    word, *words = shlex.split(command)
    start = {"python": [sys.executable], "lockstep": [sys.executable, "-m", "lockstep.workbench.cli"]}.get(
        word, [word]
    )
    # The engine is a stranger's: it finds nothing of ours on its path.
    env = os.environ | ({"PYTHONPATH": str(ROOT)} if word == "lockstep" else {"PYTHONPATH": ""})
    done = subprocess.run(
        [*start, *words], cwd=here, env=env, capture_output=True, text=True, timeout=170, check=False
    )
    assert done.returncode == expected, f"{command}: {done.returncode}\n{done.stdout}{done.stderr}"
    return done.stdout.splitlines()


def check_shown(shown: list[str], printed: list[str]) -> None:
    """Each line is printed, in this order; `…` stands for any lines, and at the end of one for any rest."""
    at = 0
    for line in shown:
        if line in ("…", ""):
            continue
        match = [i for i in range(at, len(printed)) if printed[i].rstrip().startswith(line.rstrip("…"))]
        match = [i for i in match if line.endswith("…") or printed[i].rstrip() == line]
        assert match, f"not printed: {line!r}, in:\n" + "\n".join(printed)
        at = match[0] + 1
