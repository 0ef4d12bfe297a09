"""Ranks on two machines: two groups of torchrun's in network namespaces of their own join a host in a third."""

from __future__ import annotations

import json
import re
import secrets
import subprocess
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from lockstep.workbench.exit_codes import Exit
from tests.e2e.machines import ADDRESSES, LOCKSTEP, ROOT, Machines, obstacle, two_machines

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture
def machines(tmp_path: Path) -> Iterator[Machines]:
    """Two machines and a host's."""
    if why := obstacle():
        pytest.skip(why)
    with two_machines(tmp_path, secrets.token_hex(32)) as made:
        yield made


def ids(output: str) -> list[list[int]]:
    """The tokens that `generate --json` prints."""
    return [one["ids"] for one in json.loads(output)["sequences"]]


def test_two_groups_of_torchrun_generate_what_local_ranks_do(machines: Machines, model: Path) -> None:
    words = [
        "generate",
        str(model),
        "--ids",
        "3,130,17,99",
        "--ids",
        "7,8",
        "--max-tokens",
        "24",
        "--tp",
        "4",
        "--json",
    ]
    groups = machines.torchrun(2)
    host = machines.host(*words, "--timeout", "180")
    out, err = host.communicate(timeout=300)
    assert host.returncode == Exit.OK, err
    local = subprocess.run(
        [*LOCKSTEP, *words], cwd=ROOT, capture_output=True, text=True, timeout=200, check=True
    )
    assert ids(out) == ids(local.stdout)
    for group in groups:
        reported = group.communicate(timeout=60)
        assert group.returncode == 0, reported


def test_a_machine_that_is_cut_off_in_mid_step_is_named_and_nothing_hangs(
    machines: Machines, model: Path
) -> None:
    """Both collectives of that step wait for ever; host and ranks end within the host's patience all the same."""
    machines.torchrun(1)
    host = machines.host("generate", str(model), "--ids", "3,130,17,99", "--max-tokens", "250", "--tp", "2")
    assert host.stdout is not None
    begun = host.stdout.read(8)  # some tokens are out, 240 are to come
    machines.unplug(1)
    out, err = host.communicate(timeout=90)
    assert host.returncode == Exit.RANK_LOST, err
    assert len((begun + out).split()) < 250
    assert f"rank 1 is lost: its connection from {ADDRESSES[1]} broke" in err
    assert re.search(r"rank 0 (at|in) [^;]+, step \d", err), "where each rank stood"
    _, left = psutil.wait_procs(machines.processes(), timeout=90)
    assert not left


def test_ranks_with_another_secret_are_refused_on_both_sides(machines: Machines, model: Path) -> None:
    """The ranks end with that; the host reports it once and awaits others."""
    host = machines.host("generate", str(model), "--ids", "3", "--tp", "2")
    machines.key = secrets.token_hex(32)
    for group in machines.torchrun(1):
        _, err = group.communicate(timeout=200)
        assert group.returncode != 0
        assert "did not prove the same secret to each other: set LOCKSTEP_KEY alike on both sides" in err
    assert host.poll() is None
    host.terminate()
    _, err = host.communicate(timeout=60)
    assert err.count("did not prove the secret") == 1, err
