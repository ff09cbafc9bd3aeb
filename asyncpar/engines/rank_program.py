"""The program of a rank that an engine has placed: ``python -m asyncpar.engines.rank_program [DIRECTORY]``.

The directory is private to the user; it has the call, and receives this rank's result.  By default it is the one with
the secret: the ranks of an elastic job have one command line on all places.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path

CALL_FILE = "call"
PATHS_FILE = "paths"


def value_file(rank: int) -> str:
    """Return the name of the file with the result of ``rank``; for elastic ranks, the number of the slot."""
    return f"value-{rank}"


def error_file(rank: int) -> str:
    """Return the name of the file with the exception that ended ``rank``."""
    return f"error-{rank}"


def write_whole(path: Path, content: bytes) -> None:
    """Write a file that appears whole or not at all."""
    draft = path.with_name(path.name + ".draft")
    draft.write_bytes(content)
    draft.replace(path)


def main(directory: Path) -> None:
    """Run the call as this rank."""
    sys.path[:] = json.loads((directory / PATHS_FILE).read_bytes())
    from asyncpar.core.observe.reporting import Reporter, record_failures

    rank = int(os.environ.get("RANK") or os.environ["LOCAL_RANK"])  # the rank of an elastic one changes
    reporter = Reporter.from_environment(os.environ)
    record_failures(reporter)
    _forget(directory, rank)
    may_pickle = False
    try:
        from asyncpar.engines.function_call import decode_call, encode_value

        function, arguments, keywords, may_pickle = decode_call((directory / CALL_FILE).read_bytes())
        value = function(*arguments, **keywords)
        if asyncio.iscoroutine(value):
            from asyncpar.runner import run

            value = run(value)
        write_whole(directory / value_file(rank), encode_value(value, may_pickle=may_pickle))
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    except Exception as error:
        if may_pickle:
            from asyncpar.engines.function_call import encode_error

            pickled = encode_error(error)
            if pickled is not None:
                write_whole(directory / error_file(rank), pickled)
        raise


def _forget(directory: Path, rank: int) -> None:
    """Remove the files of an earlier attempt."""
    for name in (value_file(rank), error_file(rank)):
        (directory / name).unlink(missing_ok=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(os.environ["ASYNCPAR_SECRET_FILE"]).parent)
