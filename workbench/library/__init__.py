"""What users of Lockstep call from Python: the functions and results that the package `lockstep` hands out.

The command line is built on the same functions. They print nothing and end no process: they return typed results,
and raise exceptions whose message states what to do.
"""
