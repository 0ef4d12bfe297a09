"""Readers of foreign dumps, one a format: each opens a folder and gives a `ForeignRun`."""
