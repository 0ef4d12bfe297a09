"""`python -m lockstep`: the command line."""

from lockstep.workbench.cli.entry import main

if __name__ == "__main__":
    main()
