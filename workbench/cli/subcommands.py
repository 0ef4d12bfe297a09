"""The subcommands by name. A subcommand is a module with a Typer `app`; adding one is one line here."""

from __future__ import annotations

#: Former name -> name, for one release.
FORMER = {"toggles": "faults"}
#: name -> (module, help line), in the order in which a newcomer needs them.
COMMANDS: dict[str, tuple[str, str]] = {
    "demo": ("lockstep.workbench.cli.demo", "A bug, found and fixed before your eyes, in about a minute."),
    "tui": ("lockstep.workbench.cli.tui", "Open the screens on a model or a session."),
    "run": ("lockstep.workbench.cli.run", "Debug a model: step, break, look, go back, change, check."),
    "replay": ("lockstep.workbench.cli.replay", "Replay a saved session, without the model."),
    "sessions": ("lockstep.workbench.cli.sessions", "List, show, verify, pack or remove saved sessions."),
    "diff": ("lockstep.workbench.cli.diff", "Compare two sessions, tap by tap."),
    "generate": ("lockstep.workbench.cli.generate", "Generate text from one or more prompts."),
    "check": (
        "lockstep.workbench.cli.check",
        "Hold the engine against transformers or llama.cpp, tap by tap.",
    ),
    "diagnose": (
        "lockstep.workbench.cli.diagnose",
        "Name what is wrong with a model, or with a recording, and why.",
    ),
    "invariant": (
        "lockstep.workbench.cli.invariant",
        "Run a model in ways that must not matter, and compare every tap.",
    ),
    "tap": (
        "lockstep.workbench.cli.tap",
        "The file that records an engine of your own: where it is, and --write it there.",
    ),
    "attach": (
        "lockstep.workbench.cli.attach",
        "Run another engine with a tap on every rank, and record it.",
    ),
    "weights": (
        "lockstep.workbench.cli.weights",
        "What another engine has really loaded, against the checkpoint.",
    ),
    "regress": (
        "lockstep.workbench.cli.regress",
        "Run another engine again and hold it against a recording; for CI and git bisect.",
    ),
    "mismatch": (
        "lockstep.workbench.cli.mismatch",
        "Why a rollout engine and a trainer give the same tokens other log-probabilities.",
    ),
    "import": ("lockstep.workbench.cli.import_dump", "Make a session of another engine's dump."),
    "export": (
        "lockstep.workbench.cli.export",
        "Write a session as a report, a picture, a table or a test result.",
    ),
    "web": ("lockstep.workbench.cli.web", "The screens in a browser of this machine."),
    "mcp": ("lockstep.workbench.cli.mcp", "Serve the debugger to agents (Model Context Protocol, stdio)."),
    "inspect": ("lockstep.workbench.cli.inspect", "What a checkpoint holds, and which rank gets what of it."),
    "faults": ("lockstep.workbench.cli.faults", "List the known bugs that --fault switches on."),
    "bench": ("lockstep.workbench.cli.bench", "How fast a model runs here, beside other libraries."),
    "rank": ("lockstep.workbench.cli.rank", "One rank that torchrun starts, for a host that listens."),
    "doctor": ("lockstep.workbench.cli.doctor", "Check that this machine has what is needed."),
}
