"""The folder on PYTHONPATH: nothing lies in it that a program below `lockstep attach` could import by mistake."""
