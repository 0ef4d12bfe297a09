"""`lockstep generate`: schema, exit codes, what goes to stdout and what to stderr."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from lockstep.sessions import Session, clean
from lockstep.workbench.cli.main import run
from lockstep.workbench.demo import DEFAULT_PROMPT, GGUF_DIR, haiku_has_nonce
from lockstep.workbench.models.tokenizer import find_tokenizer, need_tokenizer
from tests.checkpoints import put_nan, tiny_checkpoint, tiny_model, with_head
from tests.preloaded import run_module
from tests.workbench.models.test_tokenizer import write_tokenizer

pytestmark = pytest.mark.sampled_file(2)

ROOT = Path(__file__).resolve().parents[3]
LONG = ["--ids", "1", "--tp", "2", "--max-tokens", "250", "--temperature", "1"]
STORIES = ROOT.parent / "shared" / "data" / "stories260K"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Qwen2 without a tokenizer."""
    return tiny_checkpoint(tmp_path_factory.mktemp("model"), "qwen2")


@pytest.fixture(scope="module")
def talking(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Qwen2 whose tokens are bytes, with a chat template."""
    path = tiny_checkpoint(tmp_path_factory.mktemp("talking"), "qwen2", vocab_size=257)
    return write_tokenizer(path, chat_template="{% for m in messages %}[{{ m.content }}]{% endfor %}")


def greedy(prompt: list[int], count: int, **overrides: Any) -> list[int]:
    """What transformers goes on with."""
    reference = tiny_model("qwen2", **overrides)
    out = reference.generate(torch.tensor([prompt]), max_new_tokens=count, do_sample=False)
    return out[0, len(prompt) :].tolist()


def test_a_gguf_file_needs_nothing_beside_it(tmp_path: Path, capsys: Any) -> None:
    file = shutil.copy(GGUF_DIR / "demo-q4_k_m.gguf", tmp_path / "alone.gguf")
    words = [
        "--chat",
        "--prompt",
        DEFAULT_PROMPT,
        "--max-tokens",
        "40",
        "--save",
        str(tmp_path / "a.session"),
    ]
    assert run(["generate", str(file), *words]) == 0
    assert haiku_has_nonce(capsys.readouterr().out, "zorblat")
    with Session.open(tmp_path / "a.session") as session:
        assert (session.meta.model.name, session.meta.model.path) == ("alone", str(file))


def test_what_the_loader_found_is_reported_and_recorded(tmp_path: Path, capsys: Any) -> None:
    path, recorded = with_head(tiny_checkpoint(tmp_path, "qwen2"), 2.0), str(tmp_path / "a.session")
    assert run(["generate", str(path), "--ids", "3,5", "--max-tokens", "2", "--save", recorded]) == 0
    assert "lm_head.weight is not the embedding, though config.json has" in capsys.readouterr().err
    assert run(["sessions", "show", recorded]) == 0
    assert "note: lm_head.weight is not the embedding" in capsys.readouterr().out
    assert run(["inspect", str(path)]) == 0
    assert "! lm_head.weight is not the embedding" in capsys.readouterr().out


def test_what_cannot_be_done_is_reported_before_a_rank_starts(
    model: Path, talking: Path, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lockstep.workbench.cli.generate.Inferior", None)
    pointer = shutil.copytree(talking, tmp_path / "pointer")
    (pointer / "tokenizer.json").write_text(
        "version https://git-lfs.github.com/spec/v1\noid sha256:aa\nsize 12\n"
    )
    for words, code, stated in [
        ([str(model), "--ids", "1", "--capture", "full"], 2, "--capture selects what --save records"),
        ([str(model), "--ids", "1", "--chat"], 2, "--ids are tokens already"),
        (
            [str(model), "--ids", "1", "--save", "/proc/a.session"],
            2,
            "cannot write a session to /proc/a.session",
        ),
        ([str(pointer), "--prompt", "a"], 3, "tokenizer.json: a git-LFS pointer"),
    ]:
        assert run(["generate", *words]) == code
        assert stated in capsys.readouterr().err


def test_logits_that_are_nan_end_the_run_with_one_warning(tmp_path: Path) -> None:
    """Two sequences, one warning: it names the tap, and JSON states why each ended."""
    path = tiny_checkpoint(tmp_path, "qwen2")
    put_nan(path, "model.layers.1.mlp.up_proj.weight")
    words = ["--ids", "1,2,3", "--ids", "4", "--max-tokens", "3", "--json"]
    done = run_module("lockstep.workbench.cli", "generate", str(path), *words)
    assert done.returncode == 0, done.stderr
    bad = {"tap": "layers.1.mlp.up", "step": 0}
    reported = [
        (one["ids"], one["finish_reason"], one["first_bad_tap"])
        for one in json.loads(done.stdout)["sequences"]
    ]
    assert reported == [([], "nan", bad)] * 2
    assert done.stderr.count("warning") == 1
    assert "layers.1.mlp.up of step 0 is the first tap with NaN or Inf" in done.stderr


def test_json_of_a_ragged_batch_equals_transformers(model: Path, tmp_path: Path) -> None:
    prompts, saved = [[5, 6, 7, 8], [9, 10]], tmp_path / "run.session"
    words = [word for ids in prompts for word in ("--ids", ",".join(map(str, ids)))]
    words += ["--tp", "2", "--max-tokens", "6", "--json", "--save", str(saved)]
    done = run_module("lockstep.workbench.cli", "generate", str(model), *words)
    assert done.returncode == 0, done.stderr
    stated = json.loads(done.stdout)
    assert stated["tp"] == 2
    assert stated["tokens_per_second"] > 0
    assert stated["gigabytes_per_second"] > 0
    for reported, prompt in zip(stated["sequences"], prompts, strict=True):
        wanted = greedy(prompt, 6)
        assert (reported["prompt_ids"], reported["ids"], reported["text"]) == (prompt, wanted, None)
        assert reported["finish_reason"] == ("eos" if wanted[-1] == 2 else "length")
    assert "tokens/s" in done.stderr
    assert "GB/s" in done.stderr
    with Session.open(saved) as session:
        assert session.ranks == 2
        steps = len(session.steps())
        assert steps == max(len(reported["ids"]) for reported in stated["sequences"])
        first = [reported.ids for reported in session.step(0).sequences]
        assert [list(ids) for ids in first] == prompts
        assert session.stats(0) is not None
        assert session.meta.rules == {}


def test_eos_ends_a_sequence_and_leaves_the_others(model: Path, capsys: Any, tmp_path: Path) -> None:
    ids = greedy([5, 6, 7], 4)
    path = shutil.copytree(model, tmp_path / "eos")
    for name in ("config.json", "generation_config.json"):
        config = json.loads((path / name).read_text()) | {"eos_token_id": ids[1]}
        (path / name).write_text(json.dumps(config))
    assert (
        run(["generate", str(path), "--ids", "5,6,7", "--ids", "9,9,9,9", "--max-tokens", "4", "--json"]) == 0
    )
    reported = json.loads(capsys.readouterr().out)["sequences"]
    stop = ids.index(ids[1]) + 1
    assert (reported[0]["ids"], reported[0]["finish_reason"]) == (ids[:stop], "eos")
    assert len(reported[1]["ids"]) == 4 or reported[1]["finish_reason"] == "eos"


def test_text_goes_to_stdout_and_speed_to_stderr(talking: Path, capfd: Any) -> None:
    assert run(["generate", str(talking), "--prompt", "hé", "--chat", "--max-tokens", "12"]) == 0
    shown = capfd.readouterr()
    tokenizer = need_tokenizer(find_tokenizer(talking), talking)
    prompt = tokenizer.encode_chat([{"role": "user", "content": "hé"}])
    assert tokenizer.decode(prompt) == "[hé]"
    text = tokenizer.decode(greedy(prompt, 12, vocab_size=257))
    assert shown.out == clean(text, newlines=True) + "\n"
    assert "tokens/s" in shown.err


@pytest.mark.parametrize(
    ("words", "code", "printed"),
    [
        (["--ids", ""], 2, "empty"),
        (["--prompt", "hi"], 2, "--ids"),
        (["--ids", "1,x"], 2, "whole numbers"),
        (["--ids", "1,131"], 2, "token id 131 is out of range: the vocabulary has ids 0 to 130"),
        (["--ids", "-1"], 2, "out of range"),
        (["--ids", ",".join(["1"] * 257)], 2, "257 tokens, the context holds 256"),
        (["--ids", "1", "--tp", "3"], 2, "tp=3 does not divide 8 attention heads: use 1, 2, 4 or 8"),
        (["--ids", "1", "--fault", "mask=upside_down"], 2, "use one of filled, additive, none"),
        (["--ids", "1", "--fault", "nonsense=1"], 2, "there is no fault 'nonsense'"),
        (["--ids", "1", "--fault", "mask"], 2, "NAME=VALUE"),
        (["--ids", "1", "--fault", "mask=none", "--fault", "mask=additive"], 2, "choose one"),
        (["--ids", "1", "--fault", "qkv_sizes=mixed"], 2, "--tp 2"),
        (["--ids", "1", "--dtype", "int4"], 2, "float32"),
        (["--ids", "1", "--device", "tpu"], 2, "cpu or cuda"),
        (["--ids", "1", "--load", "sideways"], 2, "direct or rank0"),
        (["--ids", "1", "--temperature", "-1"], 2, "temperature"),
        (["--ids", "1", "--top-p", "0"], 2, "top-p"),
        (["--ids", "1", "--max-tokens", "0"], 2, "--max-tokens"),
        (["--ids", "1", "--save", "{file}"], 2, "not a session"),
        (["--ids", "1", "--save", "x.session", "--capture", "layers.99.*"], 2, "no tap matches"),
        (["--nonsense"], 2, "--nonsense"),
        ([], 2, "--prompt"),
    ],
)
def test_mistakes_are_one_line(
    model: Path, capsys: Any, tmp_path: Path, words: list[str], code: int, printed: str
) -> None:
    (tmp_path / "precious").write_text("weights")
    words = [word.format(file=tmp_path / "precious") for word in words]
    assert run(["generate", str(model), *words]) == code
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith("lockstep: error: ")
    assert shown.err.count("\n") == 1
    assert printed in shown.err
    assert (tmp_path / "precious").read_text() == "weights"


def _damaged(model: Path, directory: Path) -> dict[str, tuple[Path, str]]:
    """Checkpoints that cannot be loaded, by what is wrong: (path, what the error must speak of)."""

    def copy(name: str) -> Path:
        return shutil.copytree(model, directory / name) / "model.safetensors"

    def written(name: str, content: bytes) -> Path:
        file = copy(name)
        file.write_bytes(content)
        return file.parent

    good = (model / "model.safetensors").read_bytes()
    flipped = bytearray(good)
    flipped[20] ^= 0x40
    pickled = copy("pickle")
    pickled.rename(pickled.with_name("pytorch_model.bin"))
    index = copy("index")
    listed = {"metadata": {}, "weight_map": {"model.norm.weight": "model-00001-of-00002.safetensors"}}
    index.with_name("model.safetensors.index.json").write_text(json.dumps(listed))
    index.unlink()
    config = copy("config").with_name("config.json")
    config.write_text("{")
    return {
        "truncated": (written("truncated", good[:5000]), "model.safetensors"),
        "flipped bits": (written("flipped", bytes(flipped)), "model.safetensors"),
        "2^60": (written("huge", (1 << 60).to_bytes(8, "little") + good[8:]), str(1 << 60)),
        "git-lfs": (
            written("lfs", b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n"),
            "git lfs pull",
        ),
        "pickle": (pickled.parent, "pytorch_model.bin"),
        "absent file": (index.parent, "model-00001-of-00002.safetensors"),
        "broken config": (config.parent, "config.json"),
        "nowhere": (directory / "nowhere", "no such file"),
        "hub": (Path("owner/not-there"), "owner/not-there"),
        "control sequences": (Path("\x1b[2Jevil"), "no such file"),
    }


def test_models_that_cannot_be_loaded(model: Path, capsys: Any, tmp_path: Path) -> None:
    for what, (path, stated) in _damaged(model, tmp_path).items():
        assert run(["generate", str(path), "--ids", "1"]) == 3, what
        shown = capsys.readouterr()
        assert shown.out == ""
        assert shown.err.startswith("lockstep: error: "), what
        assert shown.err.count("\n") == 1, what
        assert stated in shown.err, what
        assert "\x1b" not in shown.err
        assert run(["check", str(path), "--ids", "1"]) == 3, what
        assert capsys.readouterr().err == shown.err, what


def test_a_traceback_is_shown_where_it_is_asked_for(tmp_path: Path, capsys: Any) -> None:
    for words in (["--debug", "generate", str(tmp_path)], ["generate", str(tmp_path), "--debug"]):
        assert run(words) == 3
        shown = capsys.readouterr().err
        assert "Traceback" in shown
        assert shown.splitlines()[-1].startswith("lockstep: error: ")


@pytest.mark.slow
def test_a_full_disk_ends_the_recording_and_not_the_run(model: Path, tmp_path: Path) -> None:
    saved = tmp_path / "run.session"
    words = ["--ids", "1,2,3", "--max-tokens", "60", "--json", "--capture", "full", "--save", str(saved)]
    done = run_module("lockstep.workbench.cli", "generate", str(model), *words, most_file_bytes=600_000)
    assert done.returncode == 3, done.stderr
    stated = json.loads(done.stdout)["sequences"][0]
    assert len(stated["ids"]) == 60 or stated["finish_reason"] == "eos"
    assert done.stderr.count("warning: nothing is recorded since step") == 1
    assert "lockstep: error: " in done.stderr
    assert "to 59) were not recorded: cannot write session" in done.stderr
    with Session.open(saved) as session:
        kept = len(session.steps())
        assert 0 < kept < 60
        assert session.step(kept - 1).sequences[0].emitted == stated["ids"][kept - 1]
        assert session.stats(kept - 1) is not None


def _interruptible() -> None:
    """A suite that a shell started in the background ignores SIGINT, and so would what it starts."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def test_interrupt_ends_every_rank(model: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "lockstep.workbench.cli", "generate", str(model), *LONG],
        cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, preexec_fn=_interruptible,
    )  # fmt: skip
    assert process.stdout is not None
    process.stdout.read(1)  # the first token is there, so the ranks are at work
    ranks = psutil.Process(process.pid).children(recursive=True)
    assert len(ranks) == 2
    process.send_signal(signal.SIGINT)
    _, stated = process.communicate(timeout=120)
    gone, alive = psutil.wait_procs(ranks, timeout=60)
    assert process.returncode == 130, stated
    assert (len(gone), alive) == (2, [])
    assert "Traceback" not in stated


def test_a_killed_rank_is_named(model: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "lockstep.workbench.cli", "generate", str(model), *LONG],
        cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdout is not None
    process.stdout.read(1)
    victims = psutil.Process(process.pid).children(recursive=True)
    victims[1].kill()
    _, stated = process.communicate(timeout=120)
    assert process.returncode == 5, stated
    assert "is lost: killed by SIGKILL" in stated
    _, alive = psutil.wait_procs(victims, timeout=60)
    assert alive == []


@pytest.mark.skipif(not STORIES.is_dir(), reason="shared data is not here")
def test_stories_come_out_as_published(capsys: Any) -> None:
    wanted = [432, 383, 286, 261, 376, 298, 315, 421, 395, 317, 426, 338, 401, 396, 267, 337]
    words = ["--ids", "1,403,407,261,378", "--max-tokens", "16", "--tp", "2", "--json"]
    assert run(["generate", str(STORIES), *words]) == 0
    assert json.loads(capsys.readouterr().out)["sequences"][0]["ids"] == wanted


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("command", ["generate", pytest.param("check", marks=pytest.mark.slow)])
def test_a_gpu_that_is_not_there(model: Path, capsys: Any, command: str) -> None:
    assert run([command, str(model), "--ids", "1", "--tp", "2", "--device", "cuda"]) in (2, 3)
    stated = capsys.readouterr().err
    assert "GPU" in stated or "CUDA" in stated
    assert stated.count("\n") == 1
