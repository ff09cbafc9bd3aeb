"""The file of a run, ``run.json``: the last picture and lines of output, which ``asyncpar report`` turns into a
page."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import msgspec

from asyncpar.core.private_files import write_private
from asyncpar.core.system_errors import os_reason
from asyncpar.errors import UsageError
from asyncpar.harmless import harmless_values

RUN_FILE: Final = "run.json"
MOST_BYTES: Final = 16 << 20
_NEEDED: Final = ("heat", "ranks", "counts", "series", "links", "operations", "actors", "values", "hosts", "sentence")


def write_run(directory: Path, document: dict[str, Any]) -> None:
    """Replace the file of the run in ``directory`` as a whole, readable by this user only.  Raises ``OSError``."""
    write_private(directory / RUN_FILE, msgspec.json.encode(harmless_values(document)))


def read_run(path: Path) -> dict[str, Any]:
    """Return the document of a run: ``path`` is the file, or the folder that has it.  Raises ``UsageError``."""
    file = path / RUN_FILE if path.is_dir() else path
    try:
        if file.stat().st_size > MOST_BYTES:
            raise UsageError(f"{file}: expected the file of a run, of at most {MOST_BYTES >> 20} MiB")
        content = file.read_bytes()
    except FileNotFoundError as error:
        raise UsageError(
            f"{file}: there is no such file; `asyncpar launch --log-dir DIR` writes DIR/{RUN_FILE}"
        ) from error
    except OSError as error:
        raise UsageError(f"{file}: cannot be read: {os_reason(error)}") from error
    try:
        document = msgspec.json.decode(content)
        picture = document["picture"]
        if not isinstance(document["lines"], list) or any(name not in picture for name in _NEEDED):
            raise UsageError(f"{file}: this is no file of a run, or one of another version")
    except (msgspec.DecodeError, KeyError, TypeError) as error:
        raise UsageError(f"{file}: this is no file of a run, or it is torn") from error
    return {"picture": picture, "lines": document["lines"]}
