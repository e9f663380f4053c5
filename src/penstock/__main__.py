"""The command `penstock`, and `python -m penstock`."""

from __future__ import annotations

import atexit
import contextlib
import os
import sys


def main() -> None:
    """Run the command that this process was started for.

    What a run has loaded Python would free piece by piece, for half a second: the process ends without.
    """
    codes: list[int] = []
    atexit.register(_leave, codes)  # before all others, which are called the other way round
    from penstock.cli.main import app  # noqa: PLC0415

    try:
        app()
    except SystemExit as end:
        codes.append(end.code if isinstance(end.code, int) else int(end.code is not None))
        raise


def _leave(codes: list[int]) -> None:
    """End the process with the exit code that was asked for; Python ends what failed otherwise."""
    for code in codes:
        try:
            if sys.stdout is not None and not sys.stdout.closed:
                sys.stdout.flush()
        except OSError as error:
            code = code or 1  # noqa: PLW2901 - the same, of a command whose output is lost
            with contextlib.suppress(OSError, ValueError, AttributeError):  # closed, or none at all
                sys.stderr.write(f"penstock: the output can't be written: {error.strerror}\n")
        with contextlib.suppress(OSError, ValueError, AttributeError):
            sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    main()
