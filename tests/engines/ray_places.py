"""Actors of Ray in which a place goes wrong as it starts."""

from __future__ import annotations

import os
import signal

from asyncpar.engines.ray_actor import RayPlace


class StoppedBeforeItsDescription(RayPlace):
    """It stops when it is asked what it is."""

    async def describe(self) -> dict[str, str]:
        """Stop this process."""
        os.kill(os.getpid(), signal.SIGSTOP)
        return await super().describe()


class StoppedBeforeItsStart(RayPlace):
    """It stops when its agent is to be started."""

    async def start(self, order: bytes) -> None:
        """Stop this process."""
        os.kill(os.getpid(), signal.SIGSTOP)
        await super().start(order)


class DeafToCommands(RayPlace):
    """It stops at the first command."""

    async def send(self, command: bytes) -> None:
        """Stop this process."""
        os.kill(os.getpid(), signal.SIGSTOP)
        await super().send(command)


class DiesInStartUp(RayPlace):
    """Its process ends before it is there."""

    def __init__(self) -> None:
        os._exit(3)
