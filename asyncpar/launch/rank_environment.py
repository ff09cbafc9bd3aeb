"""The environment of a launched rank: what the launcher adds to, and takes from, its own."""

from __future__ import annotations

from collections.abc import Mapping

from asyncpar.core.config.environment import LaunchEnvironment

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

    Nothing of an outer launch shines through.  Output is unbuffered, and with several ranks on the host numeric
    libraries get one thread each, unless ``base`` says something else about that.
    """
    environment = {name: value for name, value in base.items() if name in _SETTINGS or not name.startswith(_OURS)}
    defaults = dict(_DEFAULTS)
    if place.local_world_size > 1:
        defaults |= dict.fromkeys(_THREADS, "1")
    for name, value in defaults.items():
        environment.setdefault(name, value)
    return environment | place.to_mapping()
