"""RANKS PROGRAM …: ranks as torchrun starts them, but forked from one process that has imported transformers: half the
time. What torchrun itself does with an attached program is for the tests that use it."""

from __future__ import annotations

import os
import runpy
import socket
import sys
import traceback
from importlib import import_module

#: What ranks import, once for all of them.
SHARED = ("torch.distributed.tensor", "transformers.generation", "transformers.modeling_utils")


def main() -> int:
    for name in SHARED:
        import_module(name)
    count, *program = int(sys.argv[1]), *sys.argv[2:]
    with socket.create_server(("127.0.0.1", 0)) as found:
        port = found.getsockname()[1]
    shared = {"WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    ranks = [_forked(program, {**shared, "RANK": rank, "LOCAL_RANK": rank}) for rank in range(count)]
    return max(os.waitstatus_to_exitcode(os.waitpid(one, 0)[1]) for one in ranks)


def _forked(program: list[str], environment: dict[str, object]) -> int:
    """The process that runs it."""
    if pid := os.fork():
        return pid
    code = 1
    try:
        os.environ.update({name: str(value) for name, value in environment.items()})
        sys.argv = program
        runpy.run_path(program[0], run_name="__main__")
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(code)


if __name__ == "__main__":
    sys.exit(main())
