"""`python -m mcore`: the `mcore` command."""

import sys

from mcore.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
