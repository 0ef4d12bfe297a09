"""The subcommands by name. A subcommand is a module with a Typer `app`; adding one is one line here."""

from __future__ import annotations

#: name -> (module, help line), in the order in which a newcomer needs them.
COMMANDS: dict[str, tuple[str, str]] = {
    "demo": ("workbench.cli.demo", "A bug, found and fixed before your eyes, in about a minute."),
    "tui": ("workbench.cli.tui", "Open the screens on a model or a session."),
    "run": ("workbench.cli.run", "Debug a model: step, break, look, go back, change, check."),
    "replay": ("workbench.cli.replay", "Replay a saved session, without the model."),
    "sessions": ("workbench.cli.sessions", "List, show, verify, pack or remove saved sessions."),
    "diff": ("workbench.cli.diff", "Compare two sessions, tap by tap."),
    "generate": ("workbench.cli.generate", "Generate text from one or more prompts."),
    "check": ("workbench.cli.check", "Hold the engine against transformers or llama.cpp, tap by tap."),
    "diagnose": ("workbench.cli.diagnose", "Name what is wrong with a model, or with a recording, and why."),
    "tap": (
        "workbench.cli.tap",
        "The file that records an engine of your own: where it is, and --write it there.",
    ),
    "attach": ("workbench.cli.attach", "Run another engine with a tap on every rank, and record it."),
    "regress": (
        "workbench.cli.regress",
        "Run another engine again and hold it against a recording; for CI and git bisect.",
    ),
    "import": ("workbench.cli.import_dump", "Make a session of another engine's dump."),
    "export": ("workbench.cli.export", "Write a session as a report, a picture, a table or a test result."),
    "web": ("workbench.cli.web", "The screens in a browser of this machine."),
    "inspect": ("workbench.cli.inspect", "What a checkpoint holds, and which rank gets what of it."),
    "toggles": ("workbench.cli.toggles", "List the known bugs that --rule switches on."),
    "rank": ("workbench.cli.rank", "One rank that torchrun starts, for a host that listens."),
    "doctor": ("workbench.cli.doctor", "Check that this machine has what is needed."),
}
