"""`python -m benchmarks`: the pair on this CPU. See --help and benchmarks/README.md."""

import sys

from benchmarks.cpu_pair import main

if __name__ == "__main__":
    sys.exit(main())
