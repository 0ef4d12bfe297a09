"""What a session can be written as: the words of `lockstep export --KIND FILE` and of the debugger's `export`."""

KINDS = ("html", "svg", "png", "csv", "json", "junit")
