"""Foreign engines, recorded as they run: `launch` starts a command, `inside` goes along into each of its processes."""
