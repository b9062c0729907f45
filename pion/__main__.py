"""`python -m pion` is the `pion` command."""

from pion.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
