"""`python -m dbuf`."""

import sys

from dbuf.cli import main

if __name__ == "__main__":
    sys.exit(main())
