"""Damaged files and directories: one clear error each, with the values that disagree."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from lockstep.engine.checkpoint.files import INDEX
from lockstep.engine.checkpoint.header import read_header
from lockstep.engine.checkpoint.resolve import open_checkpoint
from lockstep.engine.errors import CheckpointError, ConfigError
from tests.checkpoints import tiny_checkpoint

pytestmark = pytest.mark.sampled_file(2)


@pytest.fixture
def single(tmp_path: Path) -> Path:
    return tiny_checkpoint(tmp_path, "qwen2")


@pytest.fixture
def indexed(tmp_path: Path) -> Path:
    return tiny_checkpoint(tmp_path, "llama", max_shard_size="50KB")


def _refused(path: Path, message: str, kind: type[Exception] = CheckpointError) -> None:
    with pytest.raises(kind, match=message) as caught:
        open_checkpoint(path)
    assert "\n" not in str(caught.value)


# --- damaged files -------------------------------------------------------------------------------------------


def _framed(text: str, data: bytes) -> bytes:
    return struct.pack("<Q", len(text)) + text.encode() + data


def _header(tensors: dict[str, Any], data: bytes) -> bytes:
    return _framed(json.dumps(tensors), data)


def _entry(dtype: Any = "F32", shape: Any = (2,), offsets: Any = (0, 8)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


ONE = '{"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}'

BROKEN: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "truncated: 0 bytes, .*; download it again"),
    "seven bytes": (b"\1" * 7, "truncated: 7 bytes, .*; download it again"),
    "claims 2^60": (struct.pack("<Q", 2**60) + b"{}", "claims 1152921504606846976 bytes but only 2 follow"),
    "claims one too many": (struct.pack("<Q", 3) + b"{}", "claims 3 bytes but only 2 follow"),
    "html": (b"<!DOCTYPE html><html>no such page</html>", "the header claims .* bytes but only"),
    "lfs": (
        b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n",
        "git-LFS pointer.*git lfs pull",
    ),
    "not json": (struct.pack("<Q", 4) + b"}}}}", "header is not valid JSON"),
    "not utf-8": (struct.pack("<Q", 4) + b'{"\xff"', "header is not valid JSON"),
    "nested": (struct.pack("<Q", 200_000) + b"[" * 200_000, "header is not valid JSON"),
    "a list": (struct.pack("<Q", 2) + b"[]", "header is not a JSON object"),
    "twice": (_framed(f'{{"a": {ONE}, "a": {ONE}}}', bytes(8)), "a.? is there twice"),
    "no dtype": (
        _header({"a": {"shape": [2], "data_offsets": [0, 8]}}, bytes(8)),
        "a: dtype, shape or data_offsets",
    ),
    "entry is text": (_header({"a": "b"}, b""), "a: dtype, shape or data_offsets"),
    "dtype": (_header({"a": _entry("F33")}, bytes(8)), "a: unknown dtype 'F33'"),
    "dtype is a list": (_header({"a": _entry(["F32"])}, bytes(8)), "a: unknown dtype"),
    "negative shape": (_header({"a": _entry(shape=[-2])}, bytes(8)), r"a: the shape \[-2\] is not"),
    "true shape": (_header({"a": _entry(shape=[True, 2])}, bytes(8)), r"a: the shape \[True, 2\] is not"),
    "huge shape": (_header({"a": _entry(shape=[2**62, 2])}, bytes(8)), "takes 3.68935e\\+19 bytes"),
    "nine dimensions": (_header({"a": _entry(shape=[1] * 8 + [2])}, bytes(8)), "a list of at most 8 sizes"),
    "shape and bytes": (_header({"a": _entry(shape=[3])}, bytes(8)), r"F32 \[3\] takes 12 bytes, .* give 8"),
    "offsets reversed": (_header({"a": _entry(offsets=[8, 0])}, bytes(8)), r"data_offsets \[8, 0\] is not"),
    "three offsets": (_header({"a": _entry(offsets=[0, 4, 8])}, bytes(8)), "is not \\[start, stop\\]"),
    "overlap": (
        _header({"a": _entry(), "b": _entry(offsets=[4, 12])}, bytes(12)),
        r"b starts at byte \d+ and overlaps a, which ends at",
    ),
    "hole": (
        _header({"a": _entry(), "b": _entry(offsets=[12, 20])}, bytes(20)),
        r"b starts at byte \d+ and leaves a hole after a, which ends at",
    ),
    "hole at the start": (
        _header({"a": _entry(offsets=[4, 12])}, bytes(12)),
        "leaves a hole after the header",
    ),
    "data cut": (
        _header({"a": _entry()}, bytes(7)),
        r"truncated: the header describes \d+ bytes, the file has \d+",
    ),
    "data left over": (_header({"a": _entry()}, bytes(9)), "bytes that belong to no tensor"),
    "escape in a name": (_header({"\x1b[2Jboo": _entry("F33")}, bytes(8)), r": \?\[2Jboo: unknown dtype"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_damaged_file_is_refused_with_the_values_that_disagree(case: str, single: Path) -> None:
    content, message = BROKEN[case]
    (single / "model.safetensors").write_bytes(content)
    _refused(single, message)


@pytest.mark.parametrize("kept", [0.999, 0.5, 0.01])
def test_a_truncated_download_is_refused(kept: float, single: Path) -> None:
    file = single / "model.safetensors"
    content = file.read_bytes()
    file.write_bytes(content[: int(len(content) * kept)])
    _refused(single, "model.safetensors: (truncated|the header claims)")


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_flipped_bits_in_the_header_never_pass_what_the_library_refuses(
    tmp_path: Path, data: st.DataObject
) -> None:
    """Any flip is either refused with our own error, or both we and the library read the same layout."""
    tensors = {"a.weight": torch.arange(6.0).reshape(2, 3), "b.bias": torch.ones(4, dtype=torch.bfloat16)}
    file = tmp_path / "flipped.safetensors"
    save_file(tensors, file)
    content = bytearray(file.read_bytes())
    (length,) = struct.unpack("<Q", content[:8])
    for bit in data.draw(st.sets(st.integers(0, 8 * (8 + length) - 1), min_size=1, max_size=3)):
        content[bit // 8] ^= 1 << bit % 8
    file.write_bytes(bytes(content))
    try:
        header = read_header(file)
    except CheckpointError:
        return
    with safe_open(file, "pt") as theirs:
        assert set(theirs.keys()) == set(header.entries)
        for name, entry in header.entries.items():
            assert tuple(theirs.get_slice(name).get_shape()) == entry.shape


# --- directories ---------------------------------------------------------------------------------------------


def _edit_index(path: Path, edit: Callable[[dict[str, str]], None]) -> None:
    file = path / "model.safetensors.index.json"
    index = json.loads(file.read_text())
    edit(index["weight_map"])
    file.write_text(json.dumps(index))


def test_an_index_that_names_absent_files_is_refused(indexed: Path) -> None:
    gone = sorted(indexed.glob("model-*.safetensors"))[:2]
    for file in gone:
        file.unlink()
    _refused(indexed, rf"index.json: names files that are absent \(2\): {gone[0].name}, {gone[1].name}")


def test_an_index_that_names_absent_tensors_is_refused(indexed: Path) -> None:
    def add(located: dict[str, str]) -> None:
        located["model.ghost"] = located["model.norm.weight"]

    _edit_index(indexed, add)
    _refused(indexed, "does not hold model.ghost, which the index places there")


def test_a_tensor_that_the_index_does_not_name_is_refused(indexed: Path) -> None:
    _edit_index(indexed, lambda located: located.pop("model.norm.weight"))
    _refused(indexed, "holds model.norm.weight, which the index does not name")


def test_a_tensor_in_two_files_is_read_where_the_index_states(indexed: Path) -> None:
    located = json.loads((indexed / "model.safetensors.index.json").read_text())["weight_map"]
    home = indexed / located["model.norm.weight"]
    other = next(file for file in sorted(indexed.glob("model-*.safetensors")) if file != home)
    expected = load_file(home)["model.norm.weight"]
    save_file(load_file(other) | {"model.norm.weight": torch.zeros(64)}, other)
    _, source = open_checkpoint(indexed)
    assert torch.equal(source.read("model.norm.weight"), expected)


@pytest.mark.parametrize(
    "name", ["../escape.safetensors", "/tmp/x.safetensors", "a\\b.safetensors", "x.bin", 7]
)
def test_an_index_cannot_leave_its_directory(name: Any, indexed: Path) -> None:
    save_file({"model.norm.weight": torch.ones(64)}, indexed.parent / "escape.safetensors")
    _edit_index(indexed, lambda located: located.update({"model.norm.weight": name}))
    _refused(indexed, "model.norm.weight is placed in .*: not the name of a safetensors file")


@pytest.mark.parametrize(
    "content", ["{", "[]", '{"weight_map": {}}', '{"weight_map": []}', '{"metadata": {}}']
)
def test_a_damaged_index_is_refused(content: str, indexed: Path) -> None:
    (indexed / "model.safetensors.index.json").write_text(content)
    with pytest.raises((CheckpointError, ConfigError), match=r"index\.json: "):
        open_checkpoint(indexed)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "consolidated.00.pth"])
def test_a_pickle_checkpoint_is_refused_by_name_and_never_opened(name: str, single: Path) -> None:
    (single / "model.safetensors").unlink()
    (single / name).write_bytes(b"\x80\x04not even a pickle")
    _refused(single, rf"{name}: a pickle checkpoint.*refused; convert it to safetensors")
    _refused(single / name, rf"{name}: a pickle checkpoint")


def test_a_file_that_only_its_name_makes_gguf(single: Path) -> None:
    (single / "model.safetensors").rename(single / "model.gguf")
    _refused(single / "model.gguf", "not a GGUF file: it begins with")
    _refused(single, "not a GGUF file: it begins with")


@pytest.mark.timeout(20)
@pytest.mark.parametrize(
    "name", ["config.json", "generation_config.json", "model.safetensors", "other.safetensors", INDEX]
)
@pytest.mark.parametrize("kind", ["a named pipe", "a device", "a directory"])
def test_what_is_no_regular_file_is_refused_before_it_is_opened(name: str, kind: str, single: Path) -> None:
    """Opening a pipe waits for a writer, reading a device never ends."""
    file = single / name
    if not name.endswith("config.json"):
        (single / "model.safetensors").unlink()
    file.unlink(missing_ok=True)
    if kind == "a named pipe":
        os.mkfifo(file)
    elif kind == "a device":
        file.symlink_to("/dev/zero")
    else:
        file.mkdir()
    with pytest.raises((CheckpointError, ConfigError), match=f"{name}: {kind}, not a file"):
        open_checkpoint(single)
    if file.suffix == ".safetensors" and kind != "a directory":
        with pytest.raises(CheckpointError, match=f"{name}: {kind}, not a file"):
            open_checkpoint(file)


def test_files_that_are_missing_are_named(single: Path, tmp_path: Path) -> None:
    _refused(tmp_path / "nowhere", "nowhere: no such file or directory")
    (single / "notes.txt").write_text("?")
    _refused(single / "notes.txt", "neither a directory nor a .safetensors or .gguf file")
    (single / "model.safetensors").unlink()
    _refused(single, "no weights: expected model.safetensors, model.safetensors.index.json or one .gguf file")
    for name in "ab":
        save_file({"x": torch.ones(1)}, single / f"{name}.safetensors")
    _refused(
        single, r"2 safetensors files \(a.safetensors, b.safetensors\) but no model.safetensors.index.json"
    )
    (single / "config.json").unlink()
    _refused(
        single,
        "no config.json: not a Hugging Face checkpoint; name the folder that has it, or download",
        ConfigError,
    )


@pytest.mark.parametrize("inner", ["weights", "snapshots/0f1e2d"])
def test_the_subfolder_with_the_configuration_is_named(inner: str, tmp_path: Path) -> None:
    first, second = tmp_path / inner, tmp_path / f"{inner}_2"
    for folder, ending in [(first, r"\?"), (second, r" \(or 1 other folder that has one\)\?")]:
        folder.mkdir(parents=True)
        (folder / "config.json").write_text("{}")
        _refused(tmp_path, f"no config.json: .*; did you mean {first}{ending}$", ConfigError)


def test_a_damaged_config_is_refused(single: Path) -> None:
    for content, message in [
        (b"{", "config.json: not valid JSON"),
        (b"\xff", "config.json: not valid JSON"),
        (b"[" * 100_000, "config.json: not valid JSON"),
        (b"3", "config.json: expected a JSON object"),
        (b"{}", "config.json: model_type is missing"),
    ]:
        (single / "config.json").write_bytes(content)
        _refused(single, message, ConfigError)
    (single / "config.json").write_bytes(b"version https://git-lfs.github.com/spec/v1\n")
    _refused(single, "config.json: a git-LFS pointer")
