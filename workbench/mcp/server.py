"""The MCP server: the tools, the sessions as resources, and the guide to the procedure."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from mcp.server import MCPServer
from mcp.server.mcpserver.exceptions import ResourceError, ToolError
from mcp.server.mcpserver.tools import Tool
from pydantic import ValidationError
from pydantic_core import ErrorDetails

from lockstep.sessions.text import clean
from lockstep.version import __version__
from lockstep.workbench.debugger.failures import explain
from lockstep.workbench.export.json import dumps
from lockstep.workbench.library.reading import open_session
from lockstep.workbench.mcp.answers import answer
from lockstep.workbench.mcp.roots import Roots
from lockstep.workbench.mcp.tools import AgentTools
from lockstep.workbench.paths import gallery_names

#: The procedure, for the agent to read.
GUIDE = Path(__file__).parent / "SKILL.md"

_INSTRUCTIONS = (
    "A debugger for LLM inference. Open a recording or a model, `compare` it with the golden reference, `diagnose` it, "
    "then look at the tensors that the diagnosis names. Read lockstep://guide first."
)


class StrictTool(Tool):
    """A tool that refuses arguments it does not have: the SDK drops them, and `step` would go elsewhere than asked."""

    async def run(self, arguments: dict[str, object], context: Any, convert_result: bool = False) -> Any:
        """As the SDK's, once every argument is known."""
        known = self.parameters["properties"]
        if unknown := [name for name in arguments if name not in known]:
            raise ToolError(
                f"{self.name} has no argument {clean(', '.join(unknown), limit=80)}: it takes {', '.join(known)}"
            )
        try:
            self.fn_metadata.validate_arguments(arguments)
        except ValidationError as error:
            raise ToolError(f"{self.name}: {'; '.join(map(self._refused, error.errors()))}") from None
        return await super().run(arguments, context, convert_result)

    def _refused(self, error: ErrorDetails) -> str:
        """One argument that is not what the schema has, in a line: what it has to be, and what came."""
        name = str(error["loc"][0])
        if error["type"] == "missing":
            return f"{name} is missing"
        schema = self.parameters["properties"][name]
        kind = f"a list of {_MANY[schema['items']['type']]}" if "items" in schema else _ONE[schema["type"]]
        return f"{name} has to be {kind}, not {clean(dumps(error['input']), limit=80)}"


#: Types of JSON schema in words.
_ONE = {"string": "a string", "integer": "a whole number", "number": "a number", "boolean": "true or false"}
_MANY = {"string": "strings", "integer": "whole numbers"}


class AgentServer:
    """The server of one client. Whatever it does runs in one thread, one call after the other: a debugger has one
    place where it stands."""

    def __init__(self, roots: Sequence[Path]) -> None:
        self._roots = Roots(roots)
        self._tools = AgentTools(self._roots)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="debugger")
        tools = self._tools
        acts = (
            tools.open, tools.where, tools.step, tools.show, tools.compare, tools.diagnose, tools.branch, tools.export,
        )  # fmt: skip
        self.mcp: MCPServer[None] = MCPServer(
            "lockstep", version=__version__, instructions=_INSTRUCTIONS, log_level="WARNING",
            tools=[
                StrictTool.from_function(self._refusing(act, ToolError), structured_output=False) for act in acts
            ],
        )  # fmt: skip
        guide = functools.partial(GUIDE.read_text, encoding="utf-8")
        self.mcp.resource("lockstep://guide", name="guide", mime_type="text/markdown")(lambda: guide())
        self.mcp.resource("lockstep://sessions", name="sessions", mime_type="application/json")(
            self._refusing(self.sessions, ResourceError)
        )
        self.mcp.resource("lockstep://session/{+name}", name="session", mime_type="application/json")(
            self._refusing(self.session, ResourceError)
        )
        self.mcp.prompt(name="debug", description="The procedure from garbage text to a named bug.")(
            lambda: guide()
        )

    def serve(self) -> None:
        """Answer on stdin and stdout until the client is gone."""
        try:
            self.mcp.run("stdio")
        finally:
            self._thread.submit(self._tools.close).result()
            self._thread.shutdown()

    def sessions(self) -> str:
        """The recordings that can be opened: those under the roots, and the gallery."""
        shown = [*map(str, self._roots.sessions()), *gallery_names()]
        return answer("recordings that `open` takes", {}, sessions=shown)

    def session(self, name: str) -> str:
        """One recording: model, dtype, ranks, steps, taps, tokens, and what was judged."""
        with open_session(self._roots.recording(name)) as run:
            judged = "never judged" if run.judgement is None else run.judgement.verdict
            return answer(
                f"{run!r}, {judged}", {"session": run.path.name, "branch": run.branch, "ranks": run.ranks},
                steps=len(run.steps), captured=list(run.captured), losses=list(run.session.losses),
                tokens={seq: run.tokens(seq).text for seq in run.sequences[:8]},
            )  # fmt: skip

    def _refusing(self, act: Callable[..., str], refusal: type[Exception]) -> Callable[..., str]:
        """`act` in the debugger's thread; where the command line would refuse, its one line is the refusal."""

        @functools.wraps(act)
        def called(*words: object, **named: object) -> str:
            try:
                return self._thread.submit(act, *words, **named).result()
            except Exception as error:
                raise refusal(explain(error)[1]) from None

        return called
