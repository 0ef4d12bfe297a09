"""The host: a process of its own that holds a debugger, so that a screen stays light and never stalls.

    python -P -m lockstep.workbench.cli.host --socket PATH [--lifeline FD] MODEL
        [--ids 1,2,3]… [--prompt TEXT]… [--chat] [--tp N] [--device D] [--dtype D] [--weights W]
        [--reference R] [--fault NAME=VALUE]… [--capture WHAT]…
        [--seed N --temperature X --top-k N --top-p X] [--timeout S] [--start-timeout S] [--listen HOST:PORT]
        [--session FILE]
    python -P -m lockstep.workbench.cli.host --socket PATH [--lifeline FD] --replay FILE

It listens on a Unix socket (mode 0600; PATH lies in a folder of `engine.scratch`), serves the first client of the same
user, and ends with it, ranks included; FD shows that the client is gone before it came. Temporary files, the ranks' as
well, go beside the socket, and are gone with the last of both. `debugger.host.client` is the other side,
`debugger.host.messages` the protocol.
"""

from __future__ import annotations

import os
import signal
import sys
import tempfile
from functools import partial

from lockstep.workbench.error_log import guarded
from lockstep.workbench.exit_codes import Exit


def main() -> int:
    """The program; returns an exit code."""
    # Imported here, within the outermost net: a damaged installation is reported as well.
    from lockstep.engine.scratch import ScratchFolder
    from lockstep.sessions.text import clean
    from lockstep.workbench.cli.ending import SIGNALS
    from lockstep.workbench.debugger.errors import DebuggerError
    from lockstep.workbench.debugger.host.endpoint import accept
    from lockstep.workbench.debugger.host.options import parse_options, start_debugger
    from lockstep.workbench.debugger.host.server import Host

    options = parse_options(sys.argv[1:])
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # ctrl+c is the client's to send as an interrupt
    try:
        folder = ScratchFolder.join(options.socket.parent)
    except OSError as error:
        print(clean(f"lockstep host: {error}"), file=sys.stderr)
        return Exit.USAGE
    with folder:
        try:
            connection = accept(options.socket, options.lifeline)
        except (DebuggerError, OSError) as error:
            print(clean(f"lockstep host: {error}"), file=sys.stderr)
            return Exit.USAGE
        # The ranks and what they import see only the environment.
        os.environ["TMPDIR"] = tempfile.tempdir = str(folder.path)
        host = Host(connection, folder)
        for number in SIGNALS:
            signal.signal(number, host.end)
        return host.run(partial(start_debugger, options))


if __name__ == "__main__":
    sys.exit(guarded(main, "lockstep host"))
