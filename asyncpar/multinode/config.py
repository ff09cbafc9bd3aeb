"""Settings of training on several nodes, and the place of a rank in it.  Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Self

from asyncpar.backends.backend import CommunicationBackend
from asyncpar.core.callables import CallableFlag, CallableInt
from asyncpar.errors import UsageError
from asyncpar.zero.config import ZeROConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class MultiNodeConfig:
    """``num_nodes`` machines with ``devices_per_node`` ranks each, counted node by node, and the place of this rank.

    ``zero_config`` determines what ranks divide among themselves.  With ``gradient_compression``, gradients are sent
    between nodes in 8 bits, with error feedback unless ``zero_config.error_feedback`` is off.  ``comm_backend`` is the
    backend that a trainer without a communicator opens.  With ``overlap_comm_compute`` buckets of
    ``gradient_bucket_size_mb`` (MiB) are sent as soon as their gradients are final; of the bucket sizes and overlaps of
    ``zero_config`` and of this configuration the smaller one and the stricter one apply.  With
    ``zero_config.gradient_compression`` gradients are compressed on one node, too.  ``zero_config.average`` selects the
    mean rather than the sum over all ranks.

    ``node_rank`` is the machine of this rank, ``local_rank`` its place there, ``global_rank`` its place among all.
    """

    num_nodes: int = 1
    devices_per_node: int = 1
    node_rank: int = 0
    local_rank: int = 0
    global_rank: int = 0
    zero_config: ZeROConfig = ZeROConfig()  # noqa: RUF009  # immutable
    gradient_compression: bool = False
    comm_backend: CommunicationBackend | str = CommunicationBackend.NATIVE
    overlap_comm_compute: bool = True
    gradient_bucket_size_mb: float = 25.0

    def __post_init__(self) -> None:
        for name in ("num_nodes", "devices_per_node"):
            _check_integer(name, getattr(self, name), least=1)
        _check_rank("node_rank", self.node_rank, self.num_nodes)
        _check_rank("local_rank", self.local_rank, self.devices_per_node)
        _check_rank("global_rank", self.global_rank, self.world_size)
        expected = self.node_rank * self.devices_per_node + self.local_rank
        if self.global_rank != expected:
            raise UsageError(
                f"global_rank: expected {expected} (node_rank {self.node_rank} * {self.devices_per_node} devices + "
                f"local_rank {self.local_rank}; MultiNodeConfig.new finds it), got {self.global_rank}"
            )
        if not isinstance(self.zero_config, ZeROConfig):
            raise UsageError(f"zero_config: expected a ZeROConfig, got {self.zero_config!r}")
        self._check_unused()
        if not self.comm_backend:
            raise UsageError(f"comm_backend: expected the name of a backend, got {self.comm_backend!r}")
        if not (self.gradient_bucket_size_mb > 0.0 and math.isfinite(self.gradient_bucket_size_mb)):
            raise UsageError(
                f"gradient_bucket_size_mb: expected a positive number of MiB, got {self.gradient_bucket_size_mb}"
            )

    @classmethod
    def new(cls, num_nodes: int, devices_per_node: int, node_rank: int, local_rank: int, **settings: Any) -> Self:
        """Return the configuration of a rank given by its place; ``settings`` are the other fields."""
        return cls(
            num_nodes=num_nodes,
            devices_per_node=devices_per_node,
            node_rank=node_rank,
            local_rank=local_rank,
            global_rank=node_rank * devices_per_node + local_rank,
            **settings,
        )

    @classmethod
    def of_rank(cls, num_nodes: int, devices_per_node: int, global_rank: int, **settings: Any) -> Self:
        """Return the configuration of a rank given by its number in the world; ``settings`` are the other fields."""
        _check_integer("devices_per_node", devices_per_node, least=1)
        node_rank, local_rank = divmod(global_rank, devices_per_node)
        return cls.new(num_nodes, devices_per_node, node_rank, local_rank, **settings)

    def _check_unused(self) -> None:
        zero = self.zero_config
        if self.num_nodes > 1:
            zero.check_unused(("algorithm",), "as gradients are reduced node by node")
        if not zero.stage.shards_states:
            unused = ("algorithm", "reduce_bucket_size", "max_memory_usage_mb", "prefetch_depth", "pin_memory")
            zero.check_unused(unused, "as nothing is sharded in stage none")

    @property
    def compresses_between_nodes(self) -> bool:
        """Whether gradients are sent between nodes in 8 bits."""
        return self.num_nodes > 1 and (self.gradient_compression or self.zero_config.gradient_compression)

    @property
    def compresses(self) -> bool:
        """Whether gradients are sent in 8 bits between nodes, or between the ranks of a single node."""
        return self.compresses_between_nodes or self.zero_config.gradient_compression

    @property
    def bucket_size_mb(self) -> float:
        """The smaller bucket size of this configuration and that of ZeRO, in MiB."""
        return min(self.gradient_bucket_size_mb, self.zero_config.bucket_size_mb)

    @property
    def overlaps(self) -> bool:
        """Whether buckets are sent as soon as their gradients are final."""
        return self.overlap_comm_compute and self.zero_config.overlap_comm

    @property
    def world_size(self) -> CallableInt:
        """The number of ranks; ``world_size()`` returns it as well."""
        return CallableInt(self.num_nodes * self.devices_per_node)

    @property
    def is_master(self) -> CallableFlag:
        """Whether this is rank 0 of the world; ``is_master()`` returns it as well."""
        return CallableFlag(self.global_rank == 0)

    @property
    def is_leader(self) -> bool:
        """Whether this is the first rank of its node, which represents it to other nodes."""
        return self.local_rank == 0

    def node_ranks(self, node_rank: int) -> list[int]:
        """Return the ranks of the world on a node."""
        _check_rank("node_rank", node_rank, self.num_nodes)
        first = node_rank * self.devices_per_node
        return list(range(first, first + self.devices_per_node))

    def node_local_ranks(self) -> list[int]:
        """Return the ranks of the world on this node."""
        return self.node_ranks(self.node_rank)

    def nodes(self) -> tuple[tuple[int, ...], ...]:
        """Return the ranks of the world by node."""
        return tuple(tuple(self.node_ranks(node)) for node in range(self.num_nodes))

    def describe(self) -> tuple[str, ...]:
        """Return the settings that must be the same on all ranks, in words."""
        return (
            f"num_nodes {self.num_nodes}",
            f"devices_per_node {self.devices_per_node}",
            f"gradient_compression {self.gradient_compression}",
            f"overlap_comm_compute {self.overlap_comm_compute}",
            f"gradient_bucket_size_mb {self.gradient_bucket_size_mb:g}",
            f"zero_config {self.zero_config}",
        )


def _check_integer(name: str, value: object, *, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise UsageError(f"{name}: expected an integer of at least {least}, got {value!r}")


def _check_rank(name: str, value: object, size: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < size:
        raise UsageError(f"{name}: expected 0..{size - 1}, got {value!r}")
