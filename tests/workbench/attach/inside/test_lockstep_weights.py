"""The weights of a module as a rank writes them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from lockstep.workbench.attach.inside import lockstep_report
from lockstep.workbench.attach.inside.lockstep_weights import keep_weights


class _Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 3)
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.embed.weight
        self.eighth = nn.Parameter(torch.tensor([0.5, -448.0]).to(torch.float8_e4m3fn), requires_grad=False)
        self.absent = nn.Parameter(torch.empty(2, device="meta"))
        self.register_buffer("correction", torch.arange(3.0))
        self.turned = nn.Parameter(torch.arange(6.0).view(2, 3).T)


@pytest.fixture
def dump(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LOCKSTEP_TAP", str(tmp_path / "dump"))
    monkeypatch.setattr(lockstep_report, "_reported", set())
    return tmp_path / "dump"


def test_every_tensor_is_written_once_with_what_is_to_be_known(dump: Path) -> None:
    model = _Model()
    keep_weights(model, "torch", 1, 2, "path")
    reported = json.loads((dump / "rank1/weights.json").read_text())
    held = load_file(dump / "rank1/weights.safetensors")
    assert set(held) == {"embed.weight", "eighth", "correction", "turned"}
    assert torch.equal(held["embed.weight"], model.embed.weight)
    assert torch.equal(held["turned"], model.turned)
    assert held["eighth"].tolist() == [0.5, -448.0], "numbers of eight bits as numbers of 32"
    assert reported["same"] == {"head.weight": "embed.weight"}
    assert reported["skipped"] == {"absent": "meta"}
    assert reported["dtypes"] == {"eighth": "float8_e4m3fn"}
    assert (reported["rank"], reported["size"], reported["buffers"]) == (1, 2, ["correction"])


class _Adapted(nn.Linear):
    """As PEFT wraps a product: two adapters, one of which acts."""

    def __init__(self) -> None:
        super().__init__(3, 2)
        self.lora_A = nn.ModuleDict({"first": nn.Linear(3, 1), "second": nn.Linear(3, 1)})
        self.scaling = {"first": 2.0, "second": 0.5}
        self.active_adapters, self.merged_adapters, self.disable_adapters = ["first"], [], False


def test_what_modules_of_peft_do_with_their_adapter_is_written(dump: Path) -> None:
    keep_weights(nn.Sequential(_Adapted()), "torch", 0, 1)
    reported = json.loads((dump / "rank0/weights.json").read_text())
    assert reported["adapters"] == {"0": {"scale": 2.0, "active": True, "merged": False}}


def test_another_library_s_adapters_do_not_keep_weights_from_being_written(dump: Path) -> None:
    other = nn.Linear(3, 2)
    other.lora_A, other.scaling = nn.Parameter(torch.ones(1, 3)), 2.0
    keep_weights(nn.Sequential(other), "torch", 0, 1)
    assert json.loads((dump / "rank0/weights.json").read_text())["adapters"] == {}


def test_a_second_model_of_the_process_is_not_written(dump: Path) -> None:
    keep_weights(nn.Linear(2, 2), "torch", 0, 1)
    before = (dump / "rank0/weights.safetensors").read_bytes()
    keep_weights(nn.Linear(3, 3), "torch", 0, 1)
    assert (dump / "rank0/weights.safetensors").read_bytes() == before


def test_an_error_is_reported_and_the_engine_goes_on(
    dump: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda _: type("Usage", (), {"free": 8})())
    keep_weights(nn.Linear(20, 20), "torch", 0, 1)
    assert "no room on the disk" in capsys.readouterr().err
    assert not (dump / "rank0/weights.json").exists()
