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
    NotFound,
    OperationMismatch,
    PeerCancelled,
    PeerError,
    PeerLost,
    PeerTimeout,
    ProtocolError,
    RemoteError,
    RestartsExceeded,
    StaleGeneration,
    UsageError,
)
from asyncpar.meshes.errors import MeshError
from asyncpar.meshes.mesh_ref import MeshRef
from asyncpar.meshes.nodes import Nodes
from asyncpar.meshes.shape import Coordinates
from asyncpar.meshes.values import MeshValues
from asyncpar.node import Node, init
from asyncpar.observe.loop_watch import Blocked
from asyncpar.runner import run
from asyncpar.runtime.actor import Actor, endpoint
from asyncpar.runtime.dead_letters import DeadLetter, DeadLetters
from asyncpar.runtime.delivery import time_left
from asyncpar.runtime.down import Down, DownReason
from asyncpar.runtime.mailbox import Mailbox, WhenFull
from asyncpar.runtime.ref import ActorRef
from asyncpar.runtime.watches import Watch
from asyncpar.supervision.child import Child, ChildState, ChildStatus
from asyncpar.supervision.policy import Backoff, Intensity, Restart, Strategy
from asyncpar.supervision.supervisor import Supervisor

__version__ = "0.1.0"

__all__ = [
    "Actor",
    "ActorDown",
    "ActorRef",
    "AsyncparError",
    "AuthenticationError",
    "Backoff",
    "Blocked",
    "Child",
    "ChildState",
    "ChildStatus",
    "Communicator",
    "Coordinates",
    "DeadLetter",
    "DeadLetters",
    "Down",
    "DownReason",
    "Intensity",
    "LaunchError",
    "Mailbox",
    "MailboxFull",
    "Member",
    "MeshError",
    "MeshRef",
    "MeshValues",
    "Node",
    "Nodes",
    "NotFound",
    "OperationMismatch",
    "PeerCancelled",
    "PeerError",
    "PeerLost",
    "PeerTimeout",
    "ProtocolError",
    "RemoteError",
    "Restart",
    "RestartsExceeded",
    "StaleGeneration",
    "Strategy",
    "Supervisor",
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
