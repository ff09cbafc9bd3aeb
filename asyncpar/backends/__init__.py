"""Communication backends by name, and the runtime that opens them.  Start with ``runtime.py``."""

from asyncpar.backends.backend import CommunicationBackend, OpenBackend
from asyncpar.backends.compression import CompressionAlgorithm, CompressionKind
from asyncpar.backends.config import BackendConfig
from asyncpar.backends.errors import BackendNotRegistered, BackendUnavailable, GroupNotFound, NoGroup
from asyncpar.backends.existing import existing
from asyncpar.backends.group import CommunicationGroup
from asyncpar.backends.metrics import CommunicationMetrics, OperationMetrics
from asyncpar.backends.operations import CollectiveOp, CollectiveResult, ReductionOp
from asyncpar.backends.runtime import CommunicationRuntime
from asyncpar.backends.thread import ThreadBackend

__all__ = [
    "BackendConfig",
    "BackendNotRegistered",
    "BackendUnavailable",
    "CollectiveOp",
    "CollectiveResult",
    "CommunicationBackend",
    "CommunicationGroup",
    "CommunicationMetrics",
    "CommunicationRuntime",
    "CompressionAlgorithm",
    "CompressionKind",
    "GroupNotFound",
    "NoGroup",
    "OpenBackend",
    "OperationMetrics",
    "ReductionOp",
    "ThreadBackend",
    "existing",
]
