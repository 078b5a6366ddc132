"""`python -m dbuf layout` and `python -m dbuf plan`: parse, call, print."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from dbuf.cli.arguments import parse
from dbuf.errors import DbufError

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and say how it went.

    Args:
        arguments: Those of the command line by default.

    Returns:
        0, or 2 if something that was asked for is not possible; the reason is on standard error.
    """
    options = parse(arguments)
    try:
        code: int = options.command(options)
        sys.stdout.flush()
        return code
    except DbufError as error:
        print(error, file=sys.stderr)
        return 2
    except BrokenPipeError:  # `| head` has read enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
