"""The command line and the environment of a rank."""

from __future__ import annotations

import importlib.machinery
import os
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path

from asyncpar.core.config.environment import LaunchEnvironment
from asyncpar.errors import UsageError
from asyncpar.launch.options import ProgramKind


def rank_command(kind: ProgramKind, program: str, arguments: tuple[str, ...]) -> tuple[str, ...]:
    """Return the command line.  Raises ``UsageError`` when there is no such script, module or program."""
    match kind:
        case ProgramKind.SCRIPT:
            _check_script(program)
            return (sys.executable, program, *arguments)
        case ProgramKind.MODULE:
            _check_module(program)
            return (sys.executable, "-m", program, *arguments)
        case ProgramKind.PROGRAM:
            if shutil.which(program) is None:
                raise UsageError(f"program: {program} is not an executable file, nor one on PATH")
            return (program, *arguments)


def _check_script(script: str) -> None:
    path = Path(script)
    if not path.exists():
        raise UsageError(f"script: {script} does not exist (in {os.getcwd()})")
    if path.is_dir() and not (path / "__main__.py").exists():
        raise UsageError(f"script: {script} is a directory without __main__.py")
    if not os.access(path, os.R_OK):
        raise UsageError(f"script: {script} cannot be read: permission denied")


def _check_module(module: str) -> None:
    """Look for the top of the dotted name only: finding the rest would import it."""
    top = module.partition(".")[0]
    is_there = top in sys.builtin_module_names or top in sys.stdlib_module_names
    if not is_there and importlib.machinery.PathFinder.find_spec(top, [os.getcwd(), *sys.path]) is None:
        raise UsageError(f"module: {module} cannot be found; the search begins in {os.getcwd()}")


_OURS = "ASYNCPAR_"
_SETTINGS = frozenset(
    {
        "ASYNCPAR_ALGORITHM",
        "ASYNCPAR_ARENA_BYTES",
        "ASYNCPAR_ARENA_WAIT",
        "ASYNCPAR_CHECKSUMS",
        "ASYNCPAR_CONNECTIONS",
        "ASYNCPAR_LINK_TIMEOUT",
    }
)
"""Variables of ours that people set for the ranks."""

_THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
_DEFAULTS = {"PYTHONUNBUFFERED": "1", "GRPC_VERBOSITY": "ERROR"}


def rank_environment(base: Mapping[str, str], place: LaunchEnvironment) -> dict[str, str]:
    """Return ``base`` with the variables of ``place``.

    Variables of an outer launch are removed.  Output is unbuffered, and with several ranks on the host numeric
    libraries get one thread each, unless ``base`` says something else about that.
    """
    environment = {name: value for name, value in base.items() if name in _SETTINGS or not name.startswith(_OURS)}
    defaults = dict(_DEFAULTS)
    if place.local_world_size > 1:
        defaults |= dict.fromkeys(_THREADS, "1")
    for name, value in defaults.items():
        environment.setdefault(name, value)
    return environment | place.to_mapping()
