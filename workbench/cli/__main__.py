"""`python -m workbench.cli`."""

from workbench.cli.entry import main

if __name__ == "__main__":
    main()
