"""Dumps that mean harm: nothing in them runs, no file outside is opened, no size is believed, no name reaches a
terminal as it is."""

from __future__ import annotations

import json
import os
import pickle
import resource
import struct
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lockstep_msprobe import open_msprobe
from safetensors.torch import save_file

from lockstep.workbench.foreign.passes import ForeignDumpError, ForeignRun
from lockstep.workbench.foreign.readers.arrays import load_array
from lockstep.workbench.foreign.readers.files import within
from lockstep.workbench.foreign.readers.llamacpp import open_llamacpp
from lockstep.workbench.foreign.readers.sglang import open_sglang
from lockstep.workbench.foreign.readers.sglang_dumper import open_sglang_dumper
from lockstep.workbench.foreign.readers.torch_file import load_torch
from lockstep.workbench.foreign.readers.transformers import open_transformers
from tests.checkpoints import tiny_checkpoint

Open = Callable[[Path], ForeignRun]


class Payload:
    """Pickled, it writes a file when it is read."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {self.target}",)


@pytest.fixture(autouse=True)
def little_memory() -> Iterator[None]:
    """A lie about sizes that is believed fails here instead of taking the machine's memory."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + (4 << 30), hard))
    yield
    resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def sglang(folder: Path, write: Callable[[Path], None]) -> None:
    (folder / "TP0_PP0_Rank0_pid1").mkdir()
    write(folder / "TP0_PP0_Rank0_pid1" / "Pass00000.pt")


def dumper(folder: Path, write: Callable[[Path], None]) -> None:
    write(folder / "step=0___rank=0___dump_index=1___name=input_ids___recompute_status=disabled.pt")


def msprobe(folder: Path, write: Callable[[Path], None], name: str = "ids.pt") -> None:
    rank = folder / "step0" / "rank0"
    (rank / "dump_tensor_data").mkdir(parents=True)
    write(rank / "dump_tensor_data" / "ids.pt")
    ids = {"type": "torch.Tensor", "dtype": "torch.int64", "shape": [3], "data_name": name}
    data = {"Module.model.embed_tokens.Embedding.forward.0": {"input_args": [ids], "output": []}}
    (rank / "dump.json").write_text(json.dumps({"task": "tensor", "data": data}))


FORMATS: dict[str, tuple[Callable[..., None], Open]] = {
    "sglang": (sglang, open_sglang),
    "sglang-dumper": (dumper, open_sglang_dumper),
    "msprobe": (msprobe, open_msprobe),
}


def read(form: str, folder: Path) -> None:
    list(FORMATS[form][1](folder).passes(0))


@pytest.mark.parametrize("form", FORMATS)
def test_a_pickle_does_not_run_and_is_named(form: str, tmp_path: Path) -> None:
    proof = tmp_path / "proof"
    (tmp_path / "dump").mkdir()
    FORMATS[form][0](tmp_path / "dump", lambda path: torch.save({"value": Payload(proof), "meta": {}}, path))
    with pytest.raises(ForeignDumpError, match=r"\.pt: holds more than tensors.*can run code: refused"):
        read(form, tmp_path / "dump")
    assert not proof.exists()


@pytest.mark.parametrize("form", FORMATS)
def test_a_bare_pickle_is_no_dump(form: str, tmp_path: Path) -> None:
    proof = tmp_path / "proof"
    (tmp_path / "dump").mkdir()
    FORMATS[form][0](tmp_path / "dump", lambda path: path.write_bytes(pickle.dumps(Payload(proof))))
    with pytest.raises(ForeignDumpError, match=r"\.pt: is no file of torch\.save"):
        read(form, tmp_path / "dump")
    assert not proof.exists()


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("keep", [0, 1, 64, 0.5, 0.98])
def test_a_file_that_was_cut_off_is_named(form: str, keep: float, tmp_path: Path) -> None:
    def write(path: Path) -> None:
        torch.save(
            {"value": torch.arange(3), "meta": {}, "model.forward_batch_info.input_ids": torch.arange(3)},
            path,
        )
        whole = path.read_bytes()
        path.write_bytes(whole[: int(keep * len(whole)) if keep < 1 else int(keep)])

    FORMATS[form][0](tmp_path, write)
    with pytest.raises(ForeignDumpError, match=r"\.pt: "):
        read(form, tmp_path)


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    torch.save(torch.arange(3), tmp_path / "secret.pt")
    for form, (write, _) in FORMATS.items():
        (tmp_path / form).mkdir()
        write(tmp_path / form, lambda path: path.symlink_to(tmp_path / "secret.pt"))
    assert list(open_sglang(tmp_path / "sglang").passes(0)) == []
    with pytest.raises(ForeignDumpError, match="has no file"):
        open_sglang_dumper(tmp_path / "sglang-dumper")
    with pytest.raises(ForeignDumpError, match=r"ids\.pt: is a link"):
        read("msprobe", tmp_path / "msprobe")


@pytest.mark.parametrize(
    "name", ["../../../secret.pt", "/etc/passwd", "..", ".", "", "a/b.pt", "a\\b.pt", "a\0b", None, 7]
)
def test_a_path_elsewhere_is_refused(name: Any, tmp_path: Path) -> None:
    torch.save(torch.arange(3), tmp_path / "secret.pt")
    with pytest.raises(ForeignDumpError, match="is no file of"):
        within(tmp_path / "data", name)
    if name is not None:
        (tmp_path / "dump").mkdir()
        msprobe(tmp_path / "dump", lambda path: torch.save(torch.arange(3), path), name)
        with pytest.raises(ForeignDumpError, match="is no file of"):
            read("msprobe", tmp_path / "dump")


def test_a_tensor_larger_than_its_file_is_refused(tmp_path: Path) -> None:
    """One number, expanded to 2⁴⁰ of them: torch.save keeps the one."""
    torch.save(torch.zeros(1).expand(1 << 20, 1 << 20), tmp_path / "x.pt")
    with pytest.raises(ForeignDumpError, match=r"x\.pt: a tensor claims to be \[1048576, 1048576\] large"):
        load_array(tmp_path / "x.pt")


def test_a_packed_archive_is_refused(tmp_path: Path) -> None:
    """torch.save packs nothing; a record of a gigabyte in a kilobyte would."""
    torch.save(torch.zeros(8 << 20, dtype=torch.uint8), tmp_path / "plain.pt")
    with (
        zipfile.ZipFile(tmp_path / "plain.pt") as plain,
        zipfile.ZipFile(tmp_path / "packed.pt", "w", zipfile.ZIP_DEFLATED) as packed,
    ):
        for name in plain.namelist():
            packed.writestr(name, plain.read(name))
    with pytest.raises(ForeignDumpError, match=r"packed\.pt: its records claim to be larger"):
        load_torch(tmp_path / "packed.pt")


@pytest.mark.parametrize("shape", ["(1099511627776,)", "(-1,)", "(4, 4)", "(3.5,)", "__import__('os')"])
def test_a_numpy_header_that_lies_is_refused(shape: str, tmp_path: Path) -> None:
    header = f"{{'descr': '<f4', 'fortran_order': False, 'shape': {shape}, }}".encode().ljust(117) + b"\n"
    body = b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header + bytes(16)
    (tmp_path / "x.npy").write_bytes(body)
    with pytest.raises(ForeignDumpError, match=r"x\.npy: is no \.npy file"):
        load_array(tmp_path / "x.npy")


def test_numpy_objects_are_refused(tmp_path: Path) -> None:
    proof = tmp_path / "proof"
    np.save(tmp_path / "x.npy", np.array([Payload(proof)], object), allow_pickle=True)
    with pytest.raises(ForeignDumpError, match=r"x\.npy: holds Python objects, which only pickle"):
        load_array(tmp_path / "x.npy")
    assert not proof.exists()


@pytest.mark.parametrize(
    "header",
    [
        {"data": {"dtype": "F32", "shape": [1 << 40], "data_offsets": [0, 1 << 42]}},
        {"data": {"dtype": "F32", "shape": [4], "data_offsets": [0, 8]}},
        {"other": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}},
        {},
    ],
)
def test_a_safetensors_header_that_lies_is_refused(header: dict[str, Any], tmp_path: Path) -> None:
    reported = json.dumps(header).encode()
    (tmp_path / "x.safetensors").write_bytes(struct.pack("<Q", len(reported)) + reported + bytes(8))
    with pytest.raises(ForeignDumpError, match=r"x\.safetensors: "):
        load_array(tmp_path / "x.safetensors")


@pytest.mark.parametrize(
    "value",
    [
        torch.zeros(2).to_sparse(),
        torch.quantize_per_tensor(torch.zeros(2), 0.1, 0, torch.quint8),
        [1],
        "x",
        None,
    ],
)
def test_what_is_no_plain_tensor_is_refused(value: Any, tmp_path: Path) -> None:
    torch.save(value, tmp_path / "x.pt")
    with pytest.raises(ForeignDumpError, match=r"x\.pt: "):
        load_array(tmp_path / "x.pt")


def test_more_ranks_than_any_group_has_are_refused(tmp_path: Path) -> None:
    for name in ("a", "b", "c"):
        (tmp_path / name).mkdir()
    (tmp_path / "a" / "TP2000_PP0_Rank2000_pid1").mkdir()
    with pytest.raises(ForeignDumpError, match="2001 ranks"):
        open_sglang(tmp_path / "a")
    path = tmp_path / "b" / "step=0___rank=0___dump_index=1___name=x.pt"
    torch.save({"value": torch.zeros(1), "meta": {"world_size": 2000}}, path)
    with pytest.raises(ForeignDumpError, match="2000 ranks"):
        open_sglang_dumper(tmp_path / "b")
    (tmp_path / "c" / "step0" / "rank1999").mkdir(parents=True)
    (tmp_path / "c" / "step0" / "rank1999" / "dump.json").write_text("{}")
    with pytest.raises(ForeignDumpError, match="2000 ranks"):
        open_msprobe(tmp_path / "c")


ESCAPE = "\x1b]0;owned\x07\x1b[2J"


def test_names_with_escape_sequences_are_made_safe(tmp_path: Path) -> None:
    batch = {"input_ids": [7, 8], "positions": [0, 1], "seq_lens": [2]}
    batch = {f"model.forward_batch_info.{key}": torch.tensor(one) for key, one in batch.items()}
    taps = {f"model.layers.0.{ESCAPE}[red]": torch.zeros(2, 4), f"model.{ESCAPE}": torch.zeros(2, 4)}
    sglang(tmp_path, lambda path: torch.save(batch | taps, path))
    (found,) = open_sglang(tmp_path).passes(0)
    assert len(found.tensors) == 2
    for one in found.tensors:
        assert one.tap.isprintable()
        assert "\x1b" not in one.tap


def test_a_folder_with_escape_sequences_is_made_safe_in_errors(tmp_path: Path) -> None:
    folder = tmp_path / f"dump{ESCAPE}"
    folder.mkdir()
    for _, open_dump in (*FORMATS.values(), (None, open_transformers)):
        with pytest.raises(ForeignDumpError) as error:
            open_dump(folder)
        assert str(error.value).isprintable()


@pytest.mark.parametrize("shape", [[-1], [1 << 41], [3, 1 << 39], ["3"], [1.5], [True], [1] * 9])
def test_shapes_that_are_none_are_refused(shape: list[Any], tmp_path: Path) -> None:
    msprobe(tmp_path, lambda path: torch.save(torch.arange(3), path))
    path = tmp_path / "step0" / "rank0" / "dump.json"
    reported = json.loads(path.read_text())
    reported["data"]["Module.model.embed_tokens.Embedding.forward.0"]["output"] = [
        {"dtype": "torch.float32", "shape": shape}
    ]
    path.write_text(json.dumps(reported))
    with pytest.raises(ForeignDumpError, match=r"a shape in dump\.json is none"):
        read("msprobe", tmp_path)


@pytest.mark.parametrize(
    "text", ["", "[]", "{", '{"data": []}', "[" * 100_000, '{"data": {"Module.a.B.forward.0": 3}}']
)
def test_json_that_is_none_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "step0" / "rank0").mkdir(parents=True)
    (tmp_path / "step0" / "rank0" / "dump.json").write_text(text)
    with pytest.raises(ForeignDumpError):
        read("msprobe", tmp_path)


def test_a_tree_without_end_is_followed_no_further(tmp_path: Path) -> None:
    tree: dict[str, Any] = {"module_path": "M.model"}
    for _ in range(400):
        tree = {"module_path": "M.model", "children": [tree]}
    (tmp_path / "M_debug_tree_FULL_TENSORS.json").write_text(json.dumps(tree))
    save_file({"data": torch.tensor([[1, 2]])}, tmp_path / "M.model.embed_tokens_inputs_args_0.safetensors")
    save_file({"data": torch.tensor([[0, 1]])}, tmp_path / "M.model.rotary_emb_inputs_args_1.safetensors")
    (found,) = open_transformers(tmp_path).passes(0)
    assert found.ids == (1, 2)


def test_tensors_of_no_shape_are_left_out(tmp_path: Path) -> None:
    batch = {"input_ids": [7, 8], "positions": [0, 1], "seq_lens": [2]}
    odd = [
        torch.zeros(()),
        torch.zeros(0),
        torch.zeros(10, 0),
        torch.zeros(3, 4),
        torch.zeros(2, 2, 2, 2, 0),
        [],
    ]
    modules = (
        "self_attn.qkv_proj",
        "self_attn.q_norm",
        "mlp.gate_up_proj",
        "input_layernorm",
        "self_attn.attn",
        "x",
    )
    reported = {f"model.forward_batch_info.{key}": torch.tensor(one) for key, one in batch.items()}
    for turn in range(len(odd)):
        taps = {
            f"model.layers.0.{module}": odd[(place + turn) % len(odd)] for place, module in enumerate(modules)
        }
        folder = tmp_path / str(turn)
        folder.mkdir()
        sglang(folder, lambda path, taps=taps: torch.save(reported | taps, path))
        (found,) = open_sglang(folder).passes(0)
        assert all(one.array is not None and len(one.array) == 2 for one in found.tensors)


def test_calls_without_tensors_are_no_taps(tmp_path: Path) -> None:
    msprobe(tmp_path, lambda path: torch.save(torch.arange(3), path))
    path = tmp_path / "step0" / "rank0" / "dump.json"
    reported = json.loads(path.read_text())
    ids = reported["data"]["Module.model.embed_tokens.Embedding.forward.0"]["input_args"][0]
    reported["data"] |= {
        "Module.model.rotary_emb.R.forward.0": {"input_args": [ids], "output": [None]},
        "Module.model.layers.0.self_attn.qkv_proj.L.forward.0": {"output": []},
        "Module.model.layers.0.mlp.gate_up_proj.L.forward.0": {
            "output": [{"dtype": "torch.float32", "shape": []}]
        },
        "Module.lm_head.L.forward.0": None,
    }
    path.write_text(json.dumps(reported))
    (found,) = open_msprobe(tmp_path).passes(0)
    assert found.ids == (0, 1, 2)
    assert list(found.tensors) == []


def test_a_log_of_one_endless_line_is_read_in_pieces(tmp_path: Path) -> None:
    (tmp_path / "llamacpp-x-tokens.bin").write_bytes(struct.pack("<2i", 5, 6))
    (tmp_path / "llamacpp-x.bin").write_bytes(struct.pack("<3f", 1, 2, 3))
    (tmp_path / "x.log").write_bytes(
        b"ggml_debug: " * (1 << 20)
        + b"\nggml_debug: \x1b[2J = (f32) MUL(a{1, 1, 1, 1}, }) = {4, 2, 1, 1}\n    sum = 3\n"
        + b"ggml_debug: embd = (f32) GET_ROWS(a{1, 1, 1, 1}, }) = {4, 2, 1, 1}\n    sum = nonsense\n"
    )
    (found,) = open_llamacpp(tmp_path).passes(0)
    assert [one.tap for one in found.tensors] == ["embed", "logits"]


def test_links_and_cut_files_of_a_callback_are_named(tmp_path: Path) -> None:
    (tmp_path / "pass0").mkdir()
    np.save(tmp_path / "secret.npy", np.arange(3))
    (tmp_path / "pass0" / "ids.npy").symlink_to(tmp_path / "secret.npy")
    checkpoint = tiny_checkpoint(tmp_path, "qwen2", num_hidden_layers=1)
    with pytest.raises(ForeignDumpError, match=r"ids\.npy: is a link"):
        list(open_llamacpp(tmp_path, checkpoint).passes(0))
    (tmp_path / "pass0" / "ids.npy").unlink()
    np.save(tmp_path / "pass0" / "ids.npy", np.arange(3))
    (tmp_path / "pass0" / "0.GET_ROWS.embd.npy").write_bytes(b"\x93NUMPY\x01\x00")
    with pytest.raises(ForeignDumpError, match=r"embd\.npy: is no \.npy file"):
        list(open_llamacpp(tmp_path, checkpoint).passes(0))
