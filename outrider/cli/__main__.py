"""`python -m outrider.cli`: the `outrider` command where no script is installed."""

import sys

from outrider.cli.command_line import main

if __name__ == "__main__":
    sys.exit(main())
