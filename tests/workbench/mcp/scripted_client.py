"""An agent without a mind: it opens a model, runs some steps, asks for the diagnosis, and names the bug from the causes
alone.

`python -m tests.workbench.mcp.scripted_client` prints the table of docs/agents.md.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mcp import Client, StdioServerParameters

from lockstep.engine.faults.catalogue import FAULTS
from lockstep.workbench.models.opening import open_model
from tests.preloaded_program import command_of

TP = 2
#: What changes no number at this parallelism.
SILENT = ("cache_heads=repeated",)


class Refused(Exception):
    """A tool has refused."""


@dataclass
class Agent:
    """Calls the tools, and counts."""

    client: Client
    calls: list[str] = field(default_factory=list)

    async def call(self, tool: str, **arguments: Any) -> dict[str, Any]:
        """The answer; Refused with its line where the tool refuses."""
        self.calls.append(tool)
        result = await self.client.call_tool(tool, arguments)
        (content,) = result.content
        assert len(content.text.encode()) <= 32_000
        if result.is_error:
            raise Refused(content.text)
        return json.loads(content.text)

    async def name_bug(self, fault: str) -> str | None:
        """The catalogue's name of the first cause in a model that has one bug planted."""
        self.calls.clear()
        await self.call("open", target="demo", tp=TP, faults=[fault])
        await self.call("step", command="next 4")
        found = await self.call("diagnose")
        return found["causes"][0]["fault"] if found["causes"] else None


@asynccontextmanager
async def agent(*roots: Path) -> AsyncIterator[Agent]:
    """An agent with a server of its own, which is started as an agent's program starts it; in a test its ranks and
    recorders are forked."""
    kept = {
        name: value for name, value in os.environ.items() if name.startswith(("LOCKSTEP_", "HF_", "OMP_"))
    }
    words = command_of("lockstep", "mcp", *map(str, roots))
    async with Client(StdioServerParameters(command=sys.executable, args=words, env=kept)) as client:
        yield Agent(client)


def plantable() -> list[str]:
    """The faults of the catalogue that can act on the demo model."""
    config = open_model("demo").config
    names = [f"{one.seam}={one.value}" for one in FAULTS if one.needs(config, TP) is None]
    return [name for name in names if name not in SILENT]


async def _table() -> None:
    print("| planted | calls | named |\n| --- | --- | --- |")
    async with agent() as one:
        for fault in plantable():
            named = await one.name_bug(fault)
            print(f"| `{fault}` | {len(one.calls)} | {'yes' if named == fault else named} |", flush=True)


if __name__ == "__main__":
    asyncio.run(_table())
