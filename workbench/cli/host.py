"""The host: a process of its own that holds a debugger, so that a screen stays light and never stalls.

    python -P -m workbench.cli.host --socket PATH MODEL [--ids 1,2,3]… [--prompt TEXT]… [--chat] [--tp N]
        [--device D] [--dtype D] [--rule NAME=VALUE]… [--capture WHAT]… [--seed N --temperature X --top-k N
        --top-p X] [--timeout S] [--start-timeout S] [--listen HOST:PORT] [--session FILE]
    python -P -m workbench.cli.host --socket PATH --replay FILE

It listens on a Unix socket (mode 0600; PATH's directory must be its owner's alone), serves the first client of
the same user, and ends with it, ranks included. Temporary files, the ranks' as well, go beside the socket and
are gone with the host. `debugger.host.client` is the other side, `debugger.host.messages` the protocol.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import tempfile
from functools import partial
from pathlib import Path

from sessions.text import clean
from workbench.debugger.errors import DebuggerError
from workbench.debugger.host.endpoint import accept
from workbench.debugger.host.options import parse_options, start_debugger
from workbench.debugger.host.server import Host
from workbench.export import command as _  # noqa: F401 - enters `export` into the registry


def main() -> int:
    """The program; returns an exit code."""
    options = parse_options(sys.argv[1:])
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # ctrl+c is the client's to send as an interrupt
    try:
        connection = accept(options.socket)
    except (DebuggerError, OSError) as error:
        print(clean(f"lockstep host: {error}"), file=sys.stderr)
        return 2
    # The ranks and what they import see only the environment.
    scratch = os.environ["TMPDIR"] = tempfile.tempdir = tempfile.mkdtemp(dir=options.socket.parent)
    try:
        return Host(connection, Path(scratch)).run(partial(start_debugger, options))
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
