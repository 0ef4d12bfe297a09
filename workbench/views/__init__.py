"""The read model of a session: plain values at a place (branch, step, sequence, tap), without torch or a terminal.

Panes, reports, exports and commands ask these functions; each fact is derived in one of them only.
"""
