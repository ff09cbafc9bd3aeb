"""The public names; see ``__init__.py``."""

from . import blocking as blocking, testing as testing
from .collectives.communicator import Communicator as Communicator
from .config.world import Member as Member, World as World
from .errors import (
    ActorDown as ActorDown,
    AsyncparError as AsyncparError,
    AuthenticationError as AuthenticationError,
    LaunchError as LaunchError,
    MailboxFull as MailboxFull,
    NotFound as NotFound,
    OperationMismatch as OperationMismatch,
    PeerCancelled as PeerCancelled,
    PeerError as PeerError,
    PeerLost as PeerLost,
    PeerTimeout as PeerTimeout,
    ProtocolError as ProtocolError,
    RemoteError as RemoteError,
    RestartsExceeded as RestartsExceeded,
    StaleGeneration as StaleGeneration,
    UsageError as UsageError,
)
from .meshes.errors import MeshError as MeshError
from .meshes.mesh_ref import MeshRef as MeshRef
from .meshes.nodes import Nodes as Nodes
from .meshes.shape import Coordinates as Coordinates
from .meshes.values import MeshValues as MeshValues
from .node import Node as Node, init as init
from .observe.loop_watch import Blocked as Blocked
from .runner import run as run
from .runtime.actor import Actor as Actor, endpoint as endpoint
from .runtime.dead_letters import DeadLetter as DeadLetter, DeadLetters as DeadLetters
from .runtime.delivery import time_left as time_left
from .runtime.down import Down as Down, DownReason as DownReason
from .runtime.mailbox import Mailbox as Mailbox, WhenFull as WhenFull
from .runtime.ref import ActorRef as ActorRef
from .runtime.watches import Watch as Watch
from .supervision.child import Child as Child, ChildState as ChildState, ChildStatus as ChildStatus
from .supervision.policy import Backoff as Backoff, Intensity as Intensity, Restart as Restart, Strategy as Strategy
from .supervision.supervisor import Supervisor as Supervisor

__version__: str
__all__: list[str]
