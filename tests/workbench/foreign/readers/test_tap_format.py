"""docs/tap-format.md is true: a writer made from it alone is read, and it names what there is."""

from __future__ import annotations

import ctypes
import re
import subprocess
import sys
from pathlib import Path

import msgspec
import numpy as np
import torch

from lockstep.engine.taps.names import tap_specs
from lockstep.workbench.attach.inside.lockstep_tap import FORMAT, hashes
from lockstep.workbench.foreign.readers.lockstep import VERSION, LockstepDump, TapeFacts
from lockstep.workbench.foreign.readers.lockstep_pass import TapeLine, TapeTap

PAGE = (Path(__file__).parents[4] / "docs" / "tap-format.md").read_text(encoding="utf-8")


def test_the_writer_of_the_page(tmp_path: Path) -> None:
    code = re.search(r"<!-- writer -->\n```python\n(.*?)```", PAGE, re.DOTALL)
    assert code is not None
    subprocess.run([sys.executable, "-I", "-c", code[1]], cwd=tmp_path, check=True, timeout=60)
    (one,) = LockstepDump.open(tmp_path / "dump").passes(0)
    assert (one.ids, one.positions, one.tensors[0].layout) == ((7, 8), (0, 1), "replicate")
    np.testing.assert_array_equal(one.tensors[0].array, [[0.5], [-1]])


def test_every_key_is_reported() -> None:
    assert f"version {FORMAT}" in PAGE
    assert FORMAT == VERSION
    reported = set(re.findall(r"`(\w+)`", PAGE))
    unsaid = {"tap"}  # the version of the file that wrote it
    for kind in (TapeFacts, TapeLine, TapeTap):
        assert {field.encode_name for field in msgspec.structs.fields(kind)} - reported <= unsaid


def test_every_tap_and_its_layout_is_reported() -> None:
    """But for those that fused attention has none of."""
    rows = [
        line.split("|")[1:4]
        for line in PAGE.splitlines()
        if line.startswith("| `embed`") or "`layers.N" in line[:14]
    ]
    reported = {}
    for names, _, layouts in rows:
        first, *more = re.findall(r"`([\w.]+)`", names)
        full = [first, *(f"{first.removesuffix('.partial').rpartition('.')[0]}.{name}" for name in more)]
        found = re.findall(r"`([\w(),=]+)`", layouts)
        reported |= dict(zip(full, found * len(full) if len(found) == 1 else found, strict=False))
    for spec in tap_specs(1, {"qk_norm"}):
        name = spec.name.replace("layers.0", "layers.N")
        if name.rpartition(".")[2] not in ("k_cache", "v_cache", "scores", "probs", "final_norm", "logits"):
            assert reported[name] == str(spec.layout), name


def test_the_hash_is_the_one_stated() -> None:
    def wrapped(value: int) -> int:
        return ctypes.c_int64(value).value

    row = torch.randn(5).bfloat16()
    raw = bytes(row.view(torch.uint8).tolist()).ljust(16, b"\0")
    total = 0
    for i in range(2):
        word = int.from_bytes(raw[8 * i : 8 * i + 8], "little", signed=True)
        m = wrapped(wrapped(word + wrapped((i + 1) * -0x61C8864680B583EB)) * -0x40A7B892E31B1A47)
        m = wrapped((m ^ (m >> 29)) * -0x6B2FB644ECCEEE15)
        total += m ^ (m >> 32)
    assert hashes(row[None]).item() == wrapped(total)
