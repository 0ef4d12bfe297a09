"""Two machines and a host beside them, as three network namespaces of this one, joined by a switch that the host
has: what is unplugged there is out of reach, without a word to either side."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

from tests.running import still_running

ROOT = Path(__file__).resolve().parents[2]
LOCKSTEP = [sys.executable, "-P", "-m", "lockstep.workbench.cli"]
HOST = "10.77.0.1"
#: Of the machines with the ranks.
ADDRESSES = ("10.77.0.2", "10.77.0.3")
_PORT, _RENDEZVOUS = 29600, 29500


def obstacle() -> str:
    """Why there can be no namespaces here; "" where there can."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "network namespaces need root on Linux"
    if shutil.which("ip") is None:
        return "network namespaces are made with ip, of iproute2"
    name = f"lockstep-{os.getpid()}-probe"
    script = (
        "netns add {}",
        "-n {} link add probe0 type bridge",
        "-n {} link add probe1 type veth peer name probe2",
    )
    why = next(filter(None, (_failure(line.format(name)) for line in script)), "")
    _failure(f"netns del {name}")
    return f"no network namespaces here: {why}" if why else ""


def _failure(command: str) -> str:
    """What `ip` has against a command, "" where it carries it out."""
    return subprocess.run(["ip", *command.split()], capture_output=True, text=True).stderr.strip()


def _ip(command: str) -> None:
    assert not (why := _failure(command)), f"ip {command}: {why}"


class Machines:
    """The namespaces, and what was started in them. `key`: the secret that all of them hold."""

    def __init__(self, directory: Path, key: str) -> None:
        self.directory, self.key = directory, key
        self.names = [f"lockstep-{os.getpid()}-{name}" for name in ("host", "a", "b")]
        self.started: list[subprocess.Popen[str]] = []

    def plug(self) -> None:
        """Make the namespaces and the cables between them."""
        host, *others = self.names
        for name in self.names:
            _ip(f"netns add {name}")
            _ip(f"-n {name} link set lo up")
        _ip(f"-n {host} link add switch type bridge")
        _ip(f"-n {host} addr add {HOST}/24 dev switch")
        _ip(f"-n {host} link set switch up")
        for machine, (name, address) in enumerate(zip(others, ADDRESSES, strict=True)):
            _ip(f"-n {host} link add port{machine} type veth peer name eth0 netns {name}")
            _ip(f"-n {host} link set port{machine} master switch up")
            _ip(f"-n {name} addr add {address}/24 dev eth0")
            _ip(f"-n {name} link set eth0 up")

    def unplug(self, machine: int) -> None:
        """Cut a machine off."""
        _ip(f"-n {self.names[0]} link set port{machine} down")

    def host(self, *words: str) -> subprocess.Popen[str]:
        """A lockstep command that listens."""
        return self._start(0, [*LOCKSTEP, *words, "--listen", f"{HOST}:{_PORT}"])

    def torchrun(self, ranks: int) -> list[subprocess.Popen[str]]:
        """A group of so many ranks on each machine."""
        return [
            self._start(
                1 + machine,
                [sys.executable, "-P", "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", str(ranks),
                 "--node-rank", str(machine), "--master-addr", ADDRESSES[0], "--master-port", str(_RENDEZVOUS),
                 "--no-python", *LOCKSTEP, "rank", f"{HOST}:{_PORT}"],
            )
            for machine in range(2)
        ]  # fmt: skip

    def processes(self) -> list[psutil.Process]:
        """What runs in the namespaces."""
        found = []
        for name in self.names:
            reported = subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True).stdout
            found += still_running(map(int, reported.split()))
        return found

    def remove(self) -> None:
        """Take everything away."""
        for process in self.processes():
            process.kill()
        for process in self.started:
            process.communicate()
        for name in self.names:
            _failure(f"netns del {name}")

    def _start(self, at: int, command: list[str]) -> subprocess.Popen[str]:
        environment = {
            **os.environ, "LOCKSTEP_KEY": self.key, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "eth0", "PYTHONUNBUFFERED": "1",
        }  # fmt: skip
        process = subprocess.Popen(
            ["ip", "netns", "exec", self.names[at], *command], cwd=self.directory, env=environment,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        self.started.append(process)
        return process


@contextmanager
def two_machines(directory: Path, key: str) -> Iterator[Machines]:
    """Machines that are taken away afterwards."""
    machines = Machines(directory, key)
    try:
        machines.plug()
        yield machines
    finally:
        machines.remove()
