"""The public names; see ``__init__.py``."""

from . import blocking as blocking
from . import checkpoint as checkpoint
from . import observe as observe
from . import testing as testing
from .actors.meshes.mesh_ref import MeshRef as MeshRef
from .actors.meshes.nodes import Nodes as Nodes
from .actors.meshes.shape import Coordinates as Coordinates
from .actors.meshes.values import MeshError as MeshError
from .actors.meshes.values import MeshValues as MeshValues
from .actors.runtime.actor import Actor as Actor
from .actors.runtime.actor import endpoint as endpoint
from .actors.runtime.calls import time_left as time_left
from .actors.runtime.dead_letters import DeadLetter as DeadLetter
from .actors.runtime.dead_letters import DeadLetters as DeadLetters
from .actors.runtime.declaration import Mailbox as Mailbox
from .actors.runtime.declaration import WhenFull as WhenFull
from .actors.runtime.ending import Down as Down
from .actors.runtime.ending import DownReason as DownReason
from .actors.runtime.ref import ActorRef as ActorRef
from .actors.runtime.watches import Watch as Watch
from .actors.supervision.child import Child as Child
from .actors.supervision.child import ChildState as ChildState
from .actors.supervision.child import ChildStatus as ChildStatus
from .actors.supervision.policy import Backoff as Backoff
from .actors.supervision.policy import Intensity as Intensity
from .actors.supervision.policy import Restart as Restart
from .actors.supervision.policy import Strategy as Strategy
from .actors.supervision.supervisor import Supervisor as Supervisor
from .collectives.communicator import Communicator as Communicator
from .collectives.completion.policies import Deadline as Deadline
from .collectives.completion.policies import LateCounts as LateCounts
from .collectives.completion.policies import Quorum as Quorum
from .collectives.completion.policies import Reduced as Reduced
from .collectives.parts import Part as Part
from .collectives.parts import PartStream as PartStream
from .core.config.names import Name as Name
from .core.config.world import Member as Member
from .core.config.world import World as World
from .core.observe.loop_watch import Blocked as Blocked
from .core.observe.spans import span as span
from .elasticity.elastic_actor import ElasticActor as ElasticActor
from .elasticity.job import ElasticJob as ElasticJob
from .elasticity.job import elastic as elastic
from .engines import dask as dask
from .engines import mpi as mpi
from .engines import ray as ray
from .engines import slurm as slurm
from .engines.cluster import cluster as cluster
from .engines.connect import connect as connect
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
    NodeClosed as NodeClosed,
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
from .errors import (
    WorldChanged as WorldChanged,
)
from .errors import (
    WorldRevoked as WorldRevoked,
)
from .node import Node as Node
from .node import init as init
from .observe.progress import progress as progress
from .runner import run as run

__version__: str
__all__: list[str]
