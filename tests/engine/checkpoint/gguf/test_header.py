"""The head of a GGUF file: read as gguf-py reads it; what is malformed is refused with its place."""

from __future__ import annotations

import random
import struct
import tracemalloc
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from lockstep.engine.checkpoint.block_types import TYPES
from lockstep.engine.checkpoint.gguf.header import read_gguf_header
from lockstep.engine.checkpoint.gguf.metadata import MetadataArray
from lockstep.engine.errors import CheckpointError
from tests.engine.checkpoint.gguf.heads import array, head, info, padded, pair, string, written

U32, BOOL, TEXT, ARRAY, F32 = 4, 7, 8, 9, 6


def test_the_table_of_types_is_ggmls() -> None:
    sizes = {int(kind): (kind.name, *size) for kind, size in gguf.GGML_QUANT_SIZES.items()}
    assert len(TYPES.keys() & sizes.keys()) >= 30
    for kind in TYPES.keys() & sizes.keys():  # another version of gguf-py may know more or fewer
        assert tuple(TYPES[kind]) == sizes[kind]


@pytest.fixture(scope="module")
def sample(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tensors = {
        "token_embd.weight": np.arange(64, dtype=np.float32).reshape(2, 32),
        "output_norm.weight": np.ones(3, dtype=np.float16),  # six bytes, then padding
        "blk.0.attn_q.weight": np.zeros((4, 3, 2), dtype=np.float32),
    }
    keys = {
        "a": 7,
        "b": 0.5,
        "c": True,
        "d": "é",
        "e": ["x", "", "zz"],
        "f": [1, -2],
        "g": [0.5],
        "h": [True],
    }
    return written(tmp_path_factory.mktemp("gguf") / "sample.gguf", tensors, keys)


def test_a_file_is_read_as_gguf_py_reads_it(sample: Path) -> None:
    found, theirs = read_gguf_header(sample), gguf.GGUFReader(sample)
    assert (found.version, found.alignment, found.data_start) == (3, 32, theirs.data_offset)
    scalars = {key: value for key, value in found.metadata.items() if not isinstance(value, MetadataArray)}
    assert scalars == {"general.architecture": "llama", "a": 7, "b": 0.5, "c": True, "d": "é"}
    lists = {key: value for key, value in found.metadata.items() if isinstance(value, MetadataArray)}
    assert lists["e"].texts() == ["x", "", "zz"]
    assert [lists[key].numbers() for key in "fgh"] == [[1, -2], [0.5], [1]]
    for tensor in theirs.tensors:
        mine = found.tensors[tensor.name]
        assert mine.shape == tuple(reversed(tensor.shape.tolist()))
        assert (mine.start, mine.stop - mine.start) == (tensor.data_offset, tensor.n_bytes)
        assert mine.type.name == tensor.tensor_type.name


def test_version_2_is_the_same_but_for_the_number(sample: Path, tmp_path: Path) -> None:
    raw = sample.read_bytes()
    (tmp_path / "two.gguf").write_bytes(raw[:4] + struct.pack("<I", 2) + raw[8:])
    two, three = read_gguf_header(tmp_path / "two.gguf"), read_gguf_header(sample)
    assert (two.version, two.tensors) == (2, three.tensors)


def test_another_alignment_moves_the_tensors(tmp_path: Path) -> None:
    file = tmp_path / "wide.gguf"
    pairs = [pair("general.alignment", U32, struct.pack("<I", 256))]
    infos = [info("a", [3]), info("b", [2], offset=256)]
    file.write_bytes(padded(padded(head(pairs, infos), 256) + bytes(12), 256) + bytes(8))
    found = read_gguf_header(file)
    assert [(t.start, t.stop) for t in found.tensors.values()] == [(256, 268), (512, 520)]


def _one(pairs: Sequence[bytes] = (), **given: Any) -> bytes:
    """A file of one F32 tensor of 32 values (128 bytes)."""
    return padded(head(pairs, [info("w", [32])], **given)) + bytes(128)


HUGE = 1 << 60
MALFORMED: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "begins with b''"),
    "magic": (_one(magic=b"GGUX"), "not a GGUF file: it begins with b'GGUX'"),
    "older": (_one(magic=b"tjgg"), "an older GGML format"),
    "pointer": (b"version https://git-lfs.github.com/spec/v1\noid sha256:00", "git-LFS pointer"),
    "magic alone": (b"GGUF", "the version takes 4 bytes, but the file ends after 0"),
    "version 0": (_one(version=0), "version 0 is not supported"),
    "version 1": (_one(version=1), "version 1 is not supported"),
    "version 4": (_one(version=4), "version 4 is not supported"),
    "big-endian": (_one(version=3 << 24), r"big-endian GGUF file \(version 3"),
    "2^60 pairs": (head(pair_count=HUGE), rf"at byte 24: {HUGE} metadata pairs"),
    "2^60 tensors": (head(info_count=HUGE), rf"at byte 24: {HUGE} tensors"),
    "more pairs than there are": (_one(pair_count=1), "at byte 38: the name of tensor 0 has 0 bytes"),
    "key past the end": (head([struct.pack("<Q", HUGE) + bytes(8)]), f"metadata pair 0 takes {HUGE} bytes"),
    "key not text": (head([pair(b"\xff\xfe", U32, bytes(4))]), "at byte 24: the key of metadata pair 0 is not UTF-8"),
    "empty key": (head([pair("", U32, bytes(4))]), "pair 0 has an empty key"),
    "key twice": (head([pair("k", U32, bytes(4))] * 2), "at byte 41: metadata key 'k' is there twice"),
    "value type": (head([pair("k", 13, bytes(8))]), "at byte 33: the value of 'k' has the unknown type 13"),
    "value cut": (head([pair("key", 10, bytes(4))]), "the value of 'key' takes 8 bytes"),
    "bool of 2": (head([pair("k", BOOL, b"\2")]), "'k' is a BOOL of 2"),
    "string past the end": (head([pair("k", TEXT, struct.pack("<Q", HUGE))]), f"'k' takes {HUGE} bytes"),
    "array in array": (head([pair("k", ARRAY, array(ARRAY, 1, bytes(20)))]), "'k' is an array of arrays"),
    "array type": (head([pair("k", ARRAY, array(99, 1, bytes(20)))]), "'k' is an array of the unknown type 99"),
    "2^60 numbers": (head([pair("k", ARRAY, array(F32, HUGE, bytes(20)))]), f"{HUGE} elements of the value of 'k'"),
    "2^60 strings": (head([pair("k", ARRAY, array(TEXT, HUGE, bytes(20)))]), f"{HUGE} elements of the value of 'k'"),
    "string of an array": (
        head([pair("k", ARRAY, array(TEXT, 2, string("a") + struct.pack("<Q", HUGE)))]),
        f"string 1 of the value of 'k' takes {HUGE}",
    ),
    "alignment 0": (_one(pairs=[pair("general.alignment", U32, bytes(4))]), "general.alignment is 0"),
    "alignment 48": (_one(pairs=[pair("general.alignment", U32, b"0\0\0\0")]), "general.alignment is 48"),
    "alignment text": (_one(pairs=[pair("general.alignment", TEXT, string("32"))]), "has the type STRING, not UINT32"),
    "alignment INT32": (
        _one(pairs=[pair("general.alignment", 5, struct.pack("<i", 32))]),
        "at byte 49: general.alignment has the type INT32, not UINT32",
    ),
    "alignment BOOL": (_one(pairs=[pair("general.alignment", BOOL, b"\1")]), "has the type BOOL, not UINT32"),
    "alignment 4": (_one(pairs=[pair("general.alignment", U32, b"\4\0\0\0")]), "general.alignment is 4"),
    "no dimension": (head(infos=[info("w", [])]) + bytes(256), "at byte 24: tensor 'w' has 0 dimensions"),
    "nine dimensions": (head(infos=[info("w", [1] * 9)]) + bytes(256), "'w' has 9 dimensions"),
    "2^31 dimensions": (head(infos=[string("w") + struct.pack("<I", 1 << 31)]) + bytes(256), "'w' has 2147483648"),
    "size 0": (head(infos=[info("w", [4, 0])]) + bytes(256), r"'w' has shape \[4, 0\]: a dimension is zero"),
    "overflow": (head(infos=[info("w", [1 << 32] * 4)]) + bytes(256), "'w' of shape .* takes"),
    "wraps to 0": (head(infos=[info("w", [1 << 62, 4])]) + bytes(256), "'w' of shape .* takes"),
    "type": (head(infos=[info("w", [32], 99)]) + bytes(256), "'w' is of type 99, which GGML does not know"),
    "removed type": (head(infos=[info("w", [32], 4)]) + bytes(256), "'w' is of type 4"),
    "half a block": (head(infos=[info("w", [48], 8)]) + bytes(256), "'w' is Q8_0, but its rows of 48"),
    "tensor twice": (
        padded(head(infos=[info("w", [8]), info("w", [8], offset=32)])) + bytes(64),
        "at byte 57: tensor 'w' is there twice",
    ),
    "unnamed tensor": (padded(head(infos=[info("", [8])])) + bytes(64), "the name of tensor 0 has 0 bytes"),
    "long name": (padded(head(infos=[info("n" * 64, [8])])) + bytes(64), "the name of tensor 0 has 64 bytes"),
    "crooked offset": (padded(head(infos=[info("w", [8], offset=8)])) + bytes(64), "'w' has offset 8, no multiple"),
    "offset in a hole": (padded(head(infos=[info("w", [8], offset=32)])) + bytes(64), "offset 32; .* ends at 0"),
    "overlap": (padded(head(infos=[info("v", [16]), info("w", [8], offset=32)])) + bytes(96), "'w' has offset 32"),
    "offset 2^63": (padded(head(infos=[info("w", [8], offset=1 << 63)])) + bytes(64), f"'w' has offset {1 << 63}"),
    "one byte short": (_one()[:-1], "truncated: tensor 'w' ends at byte 192, the file has 191"),
    "padding cut": (padded(head(infos=[info("w", [3])])) + bytes(31), "truncated: 95 bytes, in the padding"),
}  # fmt: skip


@pytest.mark.parametrize("case", MALFORMED)
def test_a_malformed_file_is_refused_with_its_place(case: str, tmp_path: Path) -> None:
    raw, message = MALFORMED[case]
    file = tmp_path / "bad.gguf"
    file.write_bytes(raw)
    with pytest.raises(CheckpointError, match=message) as caught:
        read_gguf_header(file)
    assert str(file) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_no_allocation_that_the_size_of_the_file_does_not_justify(tmp_path: Path) -> None:
    file = tmp_path / "bad.gguf"
    tracemalloc.start()
    for raw, _ in MALFORMED.values():
        file.write_bytes(raw)
        with pytest.raises(CheckpointError):
            read_gguf_header(file)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1 << 20, f"{peak} bytes for files of some hundred"


def test_a_file_cut_anywhere_is_refused(sample: Path, tmp_path: Path) -> None:
    raw, file = sample.read_bytes(), tmp_path / "cut.gguf"
    for length in (*range(0, len(raw) - 100, 9), *range(len(raw) - 4, len(raw))):
        file.write_bytes(raw[:length])
        with pytest.raises(CheckpointError):
            read_gguf_header(file)


def test_a_control_character_in_a_name_does_not_reach_the_message(tmp_path: Path) -> None:
    file = tmp_path / "bad.gguf"
    file.write_bytes(head([pair("\x1b[31mk", 13, bytes(8))]))
    with pytest.raises(CheckpointError, match=r"\?\[31mk") as caught:
        read_gguf_header(file)
    assert "\x1b" not in str(caught.value)


def test_a_directory_or_a_missing_file_is_named(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "absent.gguf"):
        with pytest.raises(CheckpointError, match=str(path)):
            read_gguf_header(path)


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    flips=st.lists(st.tuples(st.integers(0, 400), st.integers(0, 255)), max_size=6), cut=st.integers(0, 900)
)
@example(flips=[], cut=0)
def test_altered_bytes_bring_a_checkpoint_error_or_a_valid_head(
    flips: list[tuple[int, int]], cut: int, sample: Path, tmp_path: Path
) -> None:
    raw = bytearray(sample.read_bytes())
    for at, value in flips:
        raw[at % len(raw)] = value
    _only_checkpoint_errors(bytes(raw[: len(raw) - cut]), tmp_path)


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(tail=st.binary(max_size=300), seed=st.integers(0, 2**32))
def test_random_bytes_after_a_right_beginning(tail: bytes, seed: int, tmp_path: Path) -> None:
    counts = [random.Random(seed).choice([0, 1, 2, 3, 255, HUGE, 2**64 - 1]) for _ in range(2)]
    _only_checkpoint_errors(b"GGUF" + struct.pack("<IQQ", 3, *counts) + tail, tmp_path)


def _only_checkpoint_errors(raw: bytes, folder: Path) -> CheckpointError | None:
    file = folder / "fuzz.gguf"
    file.write_bytes(raw)
    try:
        found = read_gguf_header(file)
    except CheckpointError as error:
        return error
    assert all(found.data_start <= t.start < t.stop <= len(raw) for t in found.tensors.values())
    for value in found.metadata.values():
        if isinstance(value, MetadataArray):
            decoded = value.texts() if value.element == "STRING" else value.numbers()
            assert len(decoded) == value.count
    return None
