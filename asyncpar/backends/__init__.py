"""Communication backends by name, and the runtime that opens them.  Start with ``runtime.py``."""

from asyncpar.backends.backend import CommunicationBackend, OpenBackend, existing
from asyncpar.backends.compression import CompressionAlgorithm, CompressionKind
from asyncpar.backends.config import BackendConfig, BackendNotRegistered, BackendUnavailable, GroupNotFound, NoGroup
from asyncpar.backends.group import CommunicationGroup
from asyncpar.backends.operations import (
    CollectiveOp,
    CollectiveResult,
    CommunicationMetrics,
    OperationMetrics,
    ReductionOp,
)
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
