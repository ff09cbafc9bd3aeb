"""Checks of the ASYNCPAR variables that people set for ranks, before any of them is used."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from typing import Final

from asyncpar.core.config.transport import parse_calibrate, parse_checksums, parse_connections, parse_link_timeout
from asyncpar.core.observe.rank_observer import WAIT_WARNING, parse_wait_warning
from asyncpar.errors import UsageError
from asyncpar.net.arena.settings import ArenaSettings

_CHOICES: Final = {"ASYNCPAR_NCCL_BETWEEN_HOSTS": ("0", "1"), "ASYNCPAR_TORCH_CUDA": ("torch", "asyncpar")}


def check_settings(environment: Mapping[str, str]) -> None:
    """Raise ``UsageError`` naming the variable for one of our settings that a rank would refuse, now or later.

    ``ASYNCPAR_ALGORITHM`` is not checked: it may name an algorithm that the program registers.
    """
    ArenaSettings.from_mapping(environment, machine=platform.machine())
    parse_calibrate(environment.get("ASYNCPAR_CALIBRATE"))
    parse_checksums(environment.get("ASYNCPAR_CHECKSUMS"))
    parse_connections(environment.get("ASYNCPAR_CONNECTIONS"))
    parse_link_timeout(environment.get("ASYNCPAR_LINK_TIMEOUT"))
    parse_wait_warning(environment.get(WAIT_WARNING))
    for name, choices in _CHOICES.items():
        found = environment.get(name)
        if found and found not in choices:
            raise UsageError(f"{name}: expected {' or '.join(choices)}, got {found!r}")
