"""The settings besides the state that all ranks of a run must share: numbers, or the routes of data, depend on them."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from asyncpar import __version__
from asyncpar.elasticity.sharded import Sharding
from asyncpar.errors import UsageError
from asyncpar.nn.optimizers import Optimizer

_DIGEST_BYTES = 8


def run_settings(sharding: Sharding, optimizers: Sequence[Optimizer]) -> dict[str, str]:
    """Return the settings of this process's run by name: those of ``elastic`` and ``state``, version and program."""
    settings = {
        "asyncpar": __version__,
        "program": _program(),
        "portions": str(sharding.portions),
        "seed": str(sharding.seed),
        "optimizers": ", ".join(str(optimizer.rule) for optimizer in optimizers),
        "zero": str(int(sharding.zero)),
        "codec": str(sharding.codec),
        "residual_codec": str(sharding.residual_codec),
        "outer": str(sharding.outer),
        "stages": str(None if sharding.pipeline is None else len(sharding.pipeline)),
    }
    return {name: value for name, value in settings.items() if value}


def _program() -> str:
    """Return the name of the program's file and a digest of its content; "" if it has none that can be read."""
    path = getattr(sys.modules.get("__main__"), "__file__", None)
    try:
        content = None if path is None else Path(path).read_bytes()
    except OSError:
        content = None
    if path is None or content is None:
        return ""
    return f"{Path(path).name}, digest {hashlib.blake2b(content, digest_size=_DIGEST_BYTES).hexdigest()}"


def check_settings(mine: Mapping[str, str], theirs: Mapping[str, str]) -> None:
    """Raise ``UsageError`` that names a setting in which this newcomer differs from the ranks that train."""
    for name in sorted(mine.keys() | theirs.keys()):
        if mine.get(name) != theirs.get(name):
            have, want = (settings.get(name, "not there") for settings in (mine, theirs))
            raise UsageError(
                f"{name}: it is {have} here and {want} on the ranks that train; a newcomer runs the same program with "
                "the same settings"
            )
