"""What a user may type for a model. The hub is never asked: a cache laid out by hand, and no network."""

from __future__ import annotations

import shutil
from pathlib import Path

import huggingface_hub.constants
import pytest

from engine.checkpoint.resolve import open_checkpoint, resolve
from engine.errors import CheckpointError
from tests.checkpoints import tiny_checkpoint

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty hub cache, offline."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    return tmp_path / "hub"


def _put(cache: Path, owner: str, name: str, checkpoint: Path) -> Path:
    """Lay out a checkpoint as the hub's client does: each file a link to a blob."""
    repository = cache / f"models--{owner}--{name}"
    snapshot = repository / "snapshots" / COMMIT
    for folder in (snapshot, repository / "refs", repository / "blobs"):
        folder.mkdir(parents=True)
    (repository / "refs" / "main").write_text(COMMIT)
    for number, file in enumerate(sorted(checkpoint.iterdir())):
        shutil.copy(file, repository / "blobs" / str(number))
        (snapshot / file.name).symlink_to(Path("../../blobs") / str(number))
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
    model, source = open_checkpoint(path)
    assert model.family == "llama"
    assert source.read("model.norm.weight").shape == (64,)


def test_a_cache_without_weights_does_not_count(tmp_path: Path, cache: Path) -> None:
    checkpoint = tiny_checkpoint(tmp_path, "llama")
    (checkpoint / "model.safetensors").unlink()
    _put(cache, "owner", "tiny", checkpoint)
    with pytest.raises(CheckpointError, match=r"owner/tiny: has no config\.json with model\.safetensors"):
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
