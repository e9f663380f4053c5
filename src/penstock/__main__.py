"""The command `penstock`, and `python -m penstock`."""

from __future__ import annotations

import atexit
import contextlib
import gc
import os
import sys


def main() -> None:
    """Run the command that this process was started for.

    The process ends without freeing what it has loaded: for a run that would take Python half a second.
    """
    gc.set_threshold(50_000, 10, 100)  # modules are no garbage: a tenth of the time to load them
    codes: list[int] = []
    atexit.register(_leave, codes)  # before all others, which are called the other way round
    from penstock.cli.main import app  # noqa: PLC0415 - it takes a while

    try:
        app()
    except SystemExit as end:
        codes.append(end.code if isinstance(end.code, int) else int(end.code is not None))
        raise


def _leave(codes: list[int]) -> None:
    """End the process with the command's exit code; without one, after an error, Python ends it."""
    if not codes:
        return
    code = codes[0]
    with contextlib.suppress(OSError, ValueError, AttributeError):  # closed, or none at all
        try:
            if sys.stdout is not None and not sys.stdout.closed:
                sys.stdout.flush()
        except OSError as error:
            code = code or 1
            sys.stderr.write(f"penstock: the output can't be written: {error.strerror}\n")
        sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
