"""`lockstep web`: the same screens in a browser of this machine, by textual-serve. An extra."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence

#: Never another: whoever reaches the port drives the terminal application.
_HOST = "127.0.0.1"


def serve(arguments: Sequence[str] = (), port: int = 8000) -> int:
    """Serve until interrupted. Each visitor gets a process of their own running `arguments`."""
    try:
        from textual_serve.server import Server
    except ImportError:
        print("lockstep web: textual-serve is missing: pip install 'lockstep[web]'", file=sys.stderr)
        return 2
    command = shlex.join([sys.executable, "-m", "workbench.tui", *arguments])
    Server(command, host=_HOST, port=port, title="Lockstep").serve()
    return 0
