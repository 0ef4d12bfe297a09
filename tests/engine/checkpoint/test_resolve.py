"""What a user may type for a model. The hub is never asked: a cache laid out by hand, and no network."""

from __future__ import annotations

import shutil
from pathlib import Path

import huggingface_hub.constants
import pytest
from huggingface_hub.errors import LocalEntryNotFoundError
from huggingface_hub.utils import filter_repo_objects

from lockstep.engine.checkpoint.resolve import open_checkpoint, resolve
from lockstep.engine.errors import CheckpointError
from lockstep.workbench.models.opening import open_model
from tests.checkpoints import tiny_checkpoint
from tests.gguf_twins import gguf_twin

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty hub cache, offline."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    return tmp_path / "hub"


def _put(cache: Path, owner: str, name: str, checkpoint: Path) -> Path:
    """Lay out a checkpoint as the hub's client does: each file (of a folder in it too) a link to a blob."""
    repository = cache / f"models--{owner}--{name}"
    snapshot = repository / "snapshots" / COMMIT
    for folder in (snapshot, repository / "refs", repository / "blobs"):
        folder.mkdir(parents=True)
    (repository / "refs" / "main").write_text(COMMIT)
    for number, file in enumerate(sorted(path for path in checkpoint.rglob("*") if path.is_file())):
        shutil.copy(file, repository / "blobs" / str(number))
        link = snapshot / file.relative_to(checkpoint)
        link.parent.mkdir(exist_ok=True)
        link.symlink_to(repository / "blobs" / str(number))
    return snapshot


def test_a_path_is_itself(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tiny_checkpoint(tmp_path, "llama")
    assert resolve(str(path)) == path
    monkeypatch.chdir(tmp_path)
    assert resolve("tiny-llama") == Path("tiny-llama")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert resolve("~/tiny-llama") == path


@pytest.mark.parametrize("shard_size", ["5GB", "50KB"])
def test_a_hub_id_is_found_in_the_cache_and_opens_through_its_links(
    shard_size: str, tmp_path: Path, cache: Path
) -> None:
    snapshot = _put(cache, "owner", "tiny", tiny_checkpoint(tmp_path, "llama", max_shard_size=shard_size))
    path = resolve("owner/tiny")
    assert path == snapshot
    assert open_model("owner/tiny").name == "tiny"  # not the commit
    model, source = open_checkpoint(path)
    assert model.family == "llama"
    assert source.read("model.norm.weight").shape == (64,)


def test_a_cache_without_weights_does_not_count(tmp_path: Path, cache: Path) -> None:
    checkpoint = tiny_checkpoint(tmp_path, "llama")
    (checkpoint / "model.safetensors").unlink()
    _put(cache, "owner", "tiny", checkpoint)
    with pytest.raises(CheckpointError, match=r"owner/tiny: has no config\.json with model\.safetensors"):
        resolve("owner/tiny")


def _quantised(folder: Path, *names: str, split: str = "") -> Path:
    """A folder of GGUF files, as repositories have them, one model in several quantisations."""
    (folder / "split").mkdir(parents=True)
    checkpoint = tiny_checkpoint(folder.parent, "qwen2")
    for name in names:
        gguf_twin(checkpoint, folder / name)
    if split:
        gguf_twin(checkpoint, folder / "split" / split, split_tensors=20)
    (folder / "README.md").write_text("a model")
    return folder


def test_a_repository_with_one_gguf_file_means_that_file(tmp_path: Path, cache: Path) -> None:
    snapshot = _put(cache, "owner", "tiny-GGUF", _quantised(tmp_path / "files", "tiny.Q8_0.gguf"))
    for text in ("owner/tiny-GGUF", "owner/tiny-GGUF:tiny.Q8_0.gguf", "owner/tiny-GGUF:q8_0"):
        assert resolve(text) == snapshot / "tiny.Q8_0.gguf"
    model, source = open_checkpoint(resolve("owner/tiny-GGUF"))
    assert model.family == "qwen2"
    assert source.read("model.norm.weight").shape == (64,)
    assert open_model("owner/tiny-GGUF").name == "tiny.Q8_0"  # not that of the blob


def test_of_several_quantisations_one_is_chosen_or_all_are_listed(tmp_path: Path, cache: Path) -> None:
    names = ("tiny-Q4_K.gguf", "tiny-Q4_K_M.gguf", "tiny-f16.gguf")
    snapshot = _put(cache, "owner", "tiny", _quantised(tmp_path / "files", *names, split="tiny-Q8_0"))
    for text, file in (
        ("tiny-f16.gguf", "tiny-f16.gguf"),
        ("F16", "tiny-f16.gguf"),
        ("Q4_K", "tiny-Q4_K.gguf"),
        ("q4_k_m", "tiny-Q4_K_M.gguf"),
        ("Q8_0", "split/tiny-Q8_0-00001-of-00002.gguf"),
        ("split/tiny-Q8_0-00001-of-00002.gguf", "split/tiny-Q8_0-00001-of-00002.gguf"),
    ):
        assert resolve(f"owner/tiny:{text}") == snapshot / file
    listed = "split/tiny-Q8_0-00001-of-00002.gguf, tiny-Q4_K.gguf, tiny-Q4_K_M.gguf, tiny-f16.gguf"
    for text, asked in (("owner/tiny", ""), ("owner/tiny:Q6_K", ", none of them 'Q6_K'"),
                        ("owner/tiny:tiny", ", several of them 'tiny'")):  # fmt: skip
        with pytest.raises(CheckpointError) as refused:
            resolve(text)
        assert (
            str(refused.value) == f"owner/tiny has 4 GGUF files{asked}: give one as owner/tiny:FILE: {listed}"
        )
    assert open_model("owner/tiny:Q8_0").name == "tiny-Q8_0"
    (snapshot / "split" / "tiny-Q8_0-00002-of-00002.gguf").unlink()
    with pytest.raises(CheckpointError, match=r"owner/tiny: .* could not be downloaded"):
        resolve("owner/tiny:Q8_0")


def test_what_the_cache_lacks_is_looked_for_on_the_hub(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def download(repository: str, local_files_only: bool, allow_patterns: list[str]) -> str:
        if local_files_only:
            raise LocalEntryNotFoundError("nothing")
        asked.append(allow_patterns)
        return str(tmp_path)

    names = ["README.md", "m-Q4_0.gguf", "m[x]-Q8_0-00001-of-00002.gguf", "m[x]-Q8_0-00002-of-00002.gguf"]
    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    monkeypatch.setattr(huggingface_hub.HfApi, "list_repo_files", lambda api, repository: names)
    assert resolve("owner/tiny:Q8_0") == tmp_path / names[2]
    (patterns,) = asked
    assert list(filter_repo_objects(names, allow_patterns=patterns)) == names[2:]
    with pytest.raises(
        CheckpointError, match=r"owner/tiny has 2 GGUF files: .*: m-Q4_0\.gguf, m\[x\]-Q8_0-00001"
    ):
        resolve("owner/tiny")


def test_offline_and_unknown_is_one_clear_error(cache: Path) -> None:
    with pytest.raises(
        CheckpointError, match=r"nobody/nothing: not a local path, not in the Hugging Face cache"
    ):
        resolve("nobody/nothing")


@pytest.mark.parametrize("text", ["./nope", "nope", "/no/such/path", "a/b/c", "-x/y", "bad\x1b[2J/name", ""])
def test_what_is_neither_path_nor_hub_id(text: str, cache: Path) -> None:
    with pytest.raises(CheckpointError, match="no such file or directory, and not a hub id") as caught:
        resolve(text)
    assert "\x1b" not in str(caught.value)
