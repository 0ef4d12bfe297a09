"""Files of torch.save, read without torch, hold what torch itself reads from them; damaged ones are refused."""

from __future__ import annotations

import io
import pickle
import random
import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lockstep.workbench.foreign.passes import ForeignDumpError
from lockstep.workbench.foreign.readers.arrays import load_array, numbers
from lockstep.workbench.foreign.readers.torch_file import TorchTensor, load_torch

DTYPES = [
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8,
    torch.uint8, torch.bool, torch.uint16, torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz,
    torch.float8_e5m2fnuz, torch.float8_e8m0fnu,
]  # fmt: skip


def every_code(dtype: torch.dtype) -> torch.Tensor:
    """[16, 16]: of a one-byte dtype all its values; of a larger one, numbers of many sizes."""
    if dtype == torch.bool:
        return torch.arange(256).reshape(16, 16) % 3 == 0
    if dtype.itemsize == 1:
        return torch.arange(256, dtype=torch.uint8).view(dtype).reshape(16, 16)
    made = torch.randn(16, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) * 1000
    return made.abs().to(dtype) if dtype == torch.uint16 else made.to(dtype)


def expected(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    tensor = tensor.detach().contiguous()
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.uint16).numpy()
    return (tensor.float() if "float8" in str(tensor.dtype) else tensor).numpy()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "view", [lambda x: x, torch.t, lambda x: x[3:9, 2:15:3], lambda x: x[0, 0], lambda x: x[:0]],
    ids=["whole", "transposed", "sliced", "scalar", "empty"],
)  # fmt: skip
def test_numbers_are_those_that_torch_reads(dtype: torch.dtype, view: Any, tmp_path: Path) -> None:
    torch.save(view(every_code(dtype)), tmp_path / "x.pt")
    _, found = load_array(tmp_path / "x.pt")
    whole = expected(torch.load(tmp_path / "x.pt", weights_only=True))
    assert found.shape == whole.shape
    assert found.dtype == whole.dtype
    assert np.array_equal(found, whole, equal_nan=whole.dtype.kind == "f")


def test_plain_values_and_containers_are_kept(tmp_path: Path) -> None:
    value = {
        "a": [1, -3, 1 << 40, 1.5, None, True, "text", b"bytes", {1, 2}, (1, (2,))],
        3: OrderedDict(b=torch.Size([2, 3])), "state": torch.nn.Linear(2, 3).state_dict(),
        "parameter": torch.nn.Parameter(torch.ones(2)), "device": torch.device("cpu"),
    }  # fmt: skip
    torch.save(value, tmp_path / "x.pt")
    found: Any = load_torch(tmp_path / "x.pt")
    assert found["a"] == value["a"]
    assert found[3] == {"b": (2, 3)}
    for name, tensor in value["state"].items():  # type: ignore[union-attr]
        assert np.array_equal(numbers(found["state"][name], tmp_path / "x.pt")[1], tensor.numpy())
    assert numbers(found["parameter"], tmp_path / "x.pt")[1].tolist() == [1, 1]


def test_tensors_that_share_memory_are_reported(tmp_path: Path) -> None:
    one = torch.arange(6)
    torch.save({"a": one, "b": one[2:], "c": one.clone()}, tmp_path / "x.pt")
    found: Any = load_torch(tmp_path / "x.pt")
    assert found["a"].memory == found["b"].memory != found["c"].memory
    assert found["b"].numbers()[1].tolist() == [2, 3, 4, 5]


def program(path: Path, text: bytes) -> Path:
    """A file of torch.save whose program is `text`."""
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("x/data.pkl", text)
        archive.writestr("x/data/0", bytes(32))
    return path


@pytest.mark.parametrize(
    "text",
    [
        b"cos\nsystem\nX\x02\x00\x00\x00ls\x85R.", b"c__builtin__\neval\nX\x01\x00\x00\x001\x85R.",
        b"ctorch\nload\n)R.", b"cbuiltins\ngetattr\n)\x81.", b"i__main__\nx\n.", b"\x80\x02]X\x01\x00\x00\x00ab.",
    ],
)  # fmt: skip
def test_a_program_that_calls_anything_else_is_refused(text: bytes, tmp_path: Path) -> None:
    with pytest.raises(ForeignDumpError, match="can run code: refused"):
        load_torch(program(tmp_path / "x.pt", text))


@pytest.mark.parametrize(
    "text",
    [b"", b"]", b"(", b"t.", b"h\x07.", b"R.", b"\x85.", b"]u.", b"(K\x01\x85\x86\x87t", b"}(K\x01u.", b"Q."],
)
def test_a_program_without_sense_is_refused(text: bytes, tmp_path: Path) -> None:
    with pytest.raises(ForeignDumpError, match=r"x\.pt: "):
        load_torch(program(tmp_path / "x.pt", text))


def test_a_tensor_stays_within_its_storage(tmp_path: Path) -> None:
    torch.save(torch.arange(8, dtype=torch.int32), tmp_path / "x.pt")
    whole = (tmp_path / "x.pt").read_bytes()
    with zipfile.ZipFile(tmp_path / "x.pt") as archive:
        text = archive.read("x/data.pkl")
    assert text.count(b"QK\x00K\x08\x85") == 1  # storage, offset 0, shape (8,)
    for lie in (b"QK\x01K\x08\x85", b"QK\x00K\x09\x85", b"QJ\xff\xff\xff\xffK\x08\x85"):
        program(tmp_path / "lie.pt", text.replace(b"QK\x00K\x08\x85", lie))
        with zipfile.ZipFile(tmp_path / "lie.pt", "a") as archive:
            archive.writestr("y", whole)  # a file that is large enough is no excuse
        with pytest.raises(ForeignDumpError, match=r"ends behind|cannot be read"):
            numbers(load_torch(tmp_path / "lie.pt"), tmp_path / "lie.pt")


@pytest.mark.slow
def test_nesting_and_floods_are_refused(tmp_path: Path) -> None:
    deep = b"]" * 100_000 + b"a" * 99_999 + b"."
    with pytest.raises(ForeignDumpError, match="nested too deeply"):
        load_torch(program(tmp_path / "deep.pt", deep))
    with pytest.raises(ForeignDumpError, match="instructions"):
        load_torch(program(tmp_path / "flood.pt", b"N0" * (1 << 21) + b"N."))


def test_what_is_nested_twice_at_every_depth_is_read_once(tmp_path: Path) -> None:
    value: list[Any] = [torch.ones(1)]
    for _ in range(80):
        value = [value, value]
    torch.save(value, tmp_path / "x.pt")
    found: Any = load_torch(tmp_path / "x.pt")
    assert found[0] is found[1]


def test_damage_is_an_error_of_ours_or_none(tmp_path: Path) -> None:
    torch.save({"value": torch.arange(12.0).reshape(3, 4), "meta": {"rank": 0}}, tmp_path / "x.pt")
    whole, chance = (tmp_path / "x.pt").read_bytes(), random.Random(0)
    for _ in range(300):
        damaged = bytearray(whole)
        for _ in range(chance.randint(1, 4)):
            damaged[chance.randrange(len(damaged))] = chance.randrange(256)
        (tmp_path / "y.pt").write_bytes(
            damaged[: chance.choice([len(damaged), chance.randrange(len(damaged))])]
        )
        try:
            found = load_torch(tmp_path / "y.pt")
            tensors = found.values() if isinstance(found, dict) else [found]
            for one in tensors:
                if isinstance(one, TorchTensor):
                    one.numbers()
        except ForeignDumpError:
            continue


def test_pickle_is_not_used() -> None:
    """What the standard library's machine would run stays text here."""
    made = io.BytesIO()
    torch.save(torch.ones(2), made)
    with zipfile.ZipFile(made) as archive:
        name = next(one for one in archive.namelist() if one.endswith("data.pkl"))
        with pytest.raises(pickle.UnpicklingError):
            pickle.loads(archive.read(name))
