"""asyncpar: collectives, actors and parallel training as coroutines.

import asyncpar as ap, numpy as np

async def main():
    async with ap.init() as node:                # alone: a world of one; under `asyncpar launch`: one of many
        x = np.full(1 << 20, node.rank, np.float32)
        await node.world.all_reduce(x)           # in place, bit-identical on every rank

ap.run(main)
"""

from asyncpar import testing
from asyncpar.collectives.communicator import Communicator
from asyncpar.config.world import Member, World
from asyncpar.errors import (
    ActorDown,
    AsyncparError,
    AuthenticationError,
    LaunchError,
    MailboxFull,
    OperationMismatch,
    PeerCancelled,
    PeerError,
    PeerLost,
    PeerTimeout,
    ProtocolError,
    RemoteError,
    StaleGeneration,
    UsageError,
)
from asyncpar.node import Node, init
from asyncpar.runner import run
from asyncpar.runtime.actor import Actor, endpoint
from asyncpar.runtime.dead_letters import DeadLetter, DeadLetters
from asyncpar.runtime.delivery import time_left
from asyncpar.runtime.down import Down, DownReason
from asyncpar.runtime.mailbox import Mailbox, WhenFull
from asyncpar.runtime.ref import ActorRef
from asyncpar.runtime.watches import Watch

__version__ = "0.1.0"

__all__ = [
    "Actor",
    "ActorDown",
    "ActorRef",
    "AsyncparError",
    "AuthenticationError",
    "Communicator",
    "DeadLetter",
    "DeadLetters",
    "Down",
    "DownReason",
    "LaunchError",
    "Mailbox",
    "MailboxFull",
    "Member",
    "Node",
    "OperationMismatch",
    "PeerCancelled",
    "PeerError",
    "PeerLost",
    "PeerTimeout",
    "ProtocolError",
    "RemoteError",
    "StaleGeneration",
    "UsageError",
    "Watch",
    "WhenFull",
    "World",
    "endpoint",
    "init",
    "run",
    "testing",
    "time_left",
]
