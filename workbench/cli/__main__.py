"""`python -m workbench.cli`."""

from workbench.cli.main import main

if __name__ == "__main__":
    main()
