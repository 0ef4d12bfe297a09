"""What is wrong with the machine, as the home screen shows it: `lockstep doctor`."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
from contextlib import suppress

from lockstep.engine.children import start_python
from lockstep.engine.text import printable
from lockstep.workbench.tui.widgets.text_block import TextLine


async def examined() -> bytes:
    """What `lockstep doctor --json` prints, from a process of its own: it loads torch, this one must not."""
    process = start_python(
        "-m", "lockstep.workbench.cli", "doctor", "--json", stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        process_group=0,  # to be ended with all that it started
    )  # fmt: skip
    os.setpriority(os.PRIO_PROCESS, process.pid, 10)  # the keys come first
    try:
        out, _ = await asyncio.to_thread(process.communicate)
    except asyncio.CancelledError:
        with suppress(ProcessLookupError):  # it has just ended
            os.killpg(process.pid, signal.SIGKILL)
        raise
    return out


def machine_lines(out: bytes) -> list[TextLine]:
    """What `doctor --json` found, as far as it needs reporting."""
    try:
        findings = json.loads(out)
    except ValueError:
        return [[("machine  ", "quiet"), ("could not be examined: lockstep doctor shows more", "wrong")]]
    bad = [f for f in findings if isinstance(f, dict) and f.get("level") == "bad"]
    if not bad:
        return [[("machine  ", "quiet"), ("everything that is needed is here", "quiet")]]
    lines: list[TextLine] = []
    for finding in bad[:6]:
        what, found, advice = (printable(finding.get(key, ""), 100) for key in ("what", "found", "advice"))
        lines.append([("✗ ", "wrong"), (f"{what}: {found}", "text"), (f"  {advice}", "quiet")])
    return lines
