"""The public names; see ``__init__.py``."""

from . import blocking as blocking
from . import testing as testing
from .collectives.communicator import Communicator as Communicator
from .config.world import Member as Member
from .config.world import World as World
from .errors import (
    ActorDown as ActorDown,
)
from .errors import (
    AsyncparError as AsyncparError,
)
from .errors import (
    AuthenticationError as AuthenticationError,
)
from .errors import (
    LaunchError as LaunchError,
)
from .errors import (
    LinkDamaged as LinkDamaged,
)
from .errors import (
    MailboxFull as MailboxFull,
)
from .errors import (
    NotFound as NotFound,
)
from .errors import (
    OperationMismatch as OperationMismatch,
)
from .errors import (
    PeerCancelled as PeerCancelled,
)
from .errors import (
    PeerError as PeerError,
)
from .errors import (
    PeerLost as PeerLost,
)
from .errors import (
    PeerTimeout as PeerTimeout,
)
from .errors import (
    ProtocolError as ProtocolError,
)
from .errors import (
    RemoteError as RemoteError,
)
from .errors import (
    RestartsExceeded as RestartsExceeded,
)
from .errors import (
    StaleGeneration as StaleGeneration,
)
from .errors import (
    UsageError as UsageError,
)
from .meshes.mesh_ref import MeshRef as MeshRef
from .meshes.nodes import Nodes as Nodes
from .meshes.shape import Coordinates as Coordinates
from .meshes.values import MeshError as MeshError
from .meshes.values import MeshValues as MeshValues
from .node import Node as Node
from .node import init as init
from .observe.loop_watch import Blocked as Blocked
from .runner import run as run
from .runtime.actor import Actor as Actor
from .runtime.actor import endpoint as endpoint
from .runtime.dead_letters import DeadLetter as DeadLetter
from .runtime.dead_letters import DeadLetters as DeadLetters
from .runtime.declaration import Mailbox as Mailbox
from .runtime.declaration import WhenFull as WhenFull
from .runtime.delivery import time_left as time_left
from .runtime.ending import Down as Down
from .runtime.ending import DownReason as DownReason
from .runtime.ref import ActorRef as ActorRef
from .runtime.watches import Watch as Watch
from .supervision.child import Child as Child
from .supervision.child import ChildState as ChildState
from .supervision.child import ChildStatus as ChildStatus
from .supervision.policy import Backoff as Backoff
from .supervision.policy import Intensity as Intensity
from .supervision.policy import Restart as Restart
from .supervision.policy import Strategy as Strategy
from .supervision.supervisor import Supervisor as Supervisor

__version__: str
__all__: list[str]
