"""Virtual environments of the peers: contents, installation, and the start of a job in one."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from scripts.bench.jobs import JobFailedError, run, run_ranks, run_together

PEERS_DIRECTORY = Path(__file__).with_name("peers")
DEFAULT_ENVIRONMENTS = Path("~/.cache/asyncpar-bench").expanduser()


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """One peer: what pip installs, and the distribution whose version names it."""

    name: str
    requirements: tuple[str, ...]
    shown: str
    is_mpi: bool = True


ENVIRONMENTS = {
    environment.name: environment
    for environment in (
        Environment(name="gloo", requirements=("torch==2.13.0", "numpy"), shown="torch", is_mpi=False),
        Environment(name="mpich", requirements=("mpi4py", "mpich", "numpy"), shown="mpich"),
        Environment(name="openmpi", requirements=("mpi4py", "openmpi", "numpy"), shown="openmpi"),
        Environment(name="intel", requirements=("mpi4py", "impi-rt", "numpy"), shown="impi-rt"),
    )
}

ACTOR_ENVIRONMENTS = {
    environment.name: environment
    for environment in (
        Environment(name="xoscar", requirements=("xoscar", "numpy"), shown="xoscar", is_mpi=False),
        Environment(name="ray", requirements=("ray", "numpy"), shown="ray", is_mpi=False),
        Environment(name="monarch", requirements=("torchmonarch", "numpy"), shown="torchmonarch", is_mpi=False),
    )
}
"""Libraries of actors (see ``actors.py``)."""

FAULT_TOLERANT = {
    environment.name: environment
    for environment in (
        Environment(name="torchft", requirements=("torch==2.13.0", "numpy", "torchft"), shown="torchft", is_mpi=False),
    )
}
"""Libraries that outlive ranks (see ``chaos_peers.py``)."""

_KNOWN = ENVIRONMENTS | ACTOR_ENVIRONMENTS | FAULT_TOLERANT


def python_of(name: str, root: Path) -> Path:
    return root / name / "bin" / "python"


def is_installed(name: str, root: Path) -> bool:
    return version_of(name, root) is not None


def install(name: str, root: Path) -> None:
    """Make the environment of a peer.  Raises ``JobFailedError`` with what pip said."""
    environment = _KNOWN[name]
    try:
        root.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise JobFailedError(f"{root}: {error.strerror}") from error
    run([sys.executable, "-m", "venv", str(root / name)])
    pip = [str(python_of(name, root)), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    run([*pip, *environment.requirements])


def version_of(name: str, root: Path) -> str | None:
    """Return the version of a peer, None if it is not installed."""
    python = python_of(name, root)
    if not python.exists():
        return None
    ask = "import importlib.metadata as m, sys; print(m.version(sys.argv[1]))"
    asked = subprocess.run([python, "-c", ask, _KNOWN[name].shown], capture_output=True, text=True, check=False)
    return asked.stdout.strip() if asked.returncode == 0 else None


def measure_peer(name: str, root: Path, *, ranks: int, arguments: Sequence[str], limit: float) -> str:
    """Run a measurement of a peer to its end and return its standard output."""
    return (
        _measure_mpi(name, root, ranks, arguments, limit)
        if ENVIRONMENTS[name].is_mpi
        else measure_gloo([[str(python_of(name, root))]] * ranks, arguments, limit=limit)
    )


def _measure_mpi(name: str, root: Path, ranks: int, arguments: Sequence[str], limit: float) -> str:
    mpiexec = [str(root / name / "bin" / "mpiexec")]
    if name == "openmpi":  # refuses both unless told so
        mpiexec += ["--allow-run-as-root"] if os.geteuid() == 0 else []
        mpiexec += ["--oversubscribe"] if ranks > len(os.sched_getaffinity(0)) else []
    rank = [str(python_of(name, root)), str(PEERS_DIRECTORY / "mpi.py"), *arguments]
    return run([*mpiexec, "-n", str(ranks), *rank], limit=limit)


def measure_gloo(
    prefixes: Sequence[Sequence[str]],
    arguments: Sequence[str],
    *,
    limit: float,
    environment: Mapping[str, str] | None = None,
    program: str = "gloo.py",
) -> str:
    """Start a rank of Gloo with each of the command ``prefixes`` and return what rank 0 printed."""
    return run_ranks(prefixes, [str(PEERS_DIRECTORY / program), *arguments], limit=limit, environment=environment)


def measure_actors(name: str, root: Path, *, arguments: Sequence[str], limit: float) -> str:
    """Run the measurement of an actor library to its end and return its standard output."""
    command = [str(python_of(name, root)), str(PEERS_DIRECTORY / f"actors_{name}.py"), *arguments]
    path = {"PYTHONPATH": str(PEERS_DIRECTORY)}  # the processes that a library starts need the rules, too
    return run_together([command], [os.environ | path], limit=limit)
