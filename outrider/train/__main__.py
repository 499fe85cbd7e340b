"""Runs `python -m outrider.train`."""

import sys

from outrider.train.command_line import main

if __name__ == "__main__":
    sys.exit(main())
