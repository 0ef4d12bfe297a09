"""The rank's program, by name: known to what starts one, and imports nothing."""

#: It knows the whole fault catalogue.
RANK_PROGRAM = "lockstep.engine.faults.rank"
#: The same under torchrun. A program of its own: `-m` would import from the working directory.
RANK_COMMAND = "--no-python lockstep rank"
