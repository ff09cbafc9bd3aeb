"""Groups of ranks that reduce gradients together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from asyncpar.agreement.comparison import Partitions
from asyncpar.collectives.algorithms.hierarchical import Hosts
from asyncpar.collectives.communicator import Communicator
from asyncpar.collectives.subgroups import hosts_of
from asyncpar.core.config.parallel import ProcessGroupIds, RankMapping, ThreeDParallelismConfig
from asyncpar.errors import UsageError

EVERYONE, REPLICAS, SLICES, ENDS = "everyone", "dp", "tp", "pp"
"""Kinds of groups."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncGroups:
    """``everyone`` joins all ranks of the configuration, ``replicas`` those with this rank's slice of this stage.

    ``tp`` joins the tensor-parallel ranks of this replica and stage, ``embedding`` the first and the last stage of this
    rank's pipeline; None where there is nobody else, and ``embedding`` also on the stages in between.
    """

    everyone: Communicator
    replicas: Communicator
    tp: Communicator | None = None
    embedding: Communicator | None = None
    partitions: Partitions = field(default_factory=dict)
    """All groups of each kind in which ranks must agree, also those without this rank."""

    @property
    def is_data_parallel_only(self) -> bool:
        """Are all ranks replicas?"""
        return self.everyone.size == self.replicas.size

    @property
    def host_patterns(self) -> frozenset[Hosts]:
        """How groups of replicas lie on hosts, each as places in the group by host; equal on all ranks."""
        hosts = self.everyone.hosts
        return frozenset(hosts_of(hosts, tuple(ranks)) for ranks in self.partitions[REPLICAS])

    @property
    def all(self) -> tuple[Communicator, ...]:
        """Each group once."""
        groups = [self.everyone, self.replicas, self.tp, self.embedding]
        return tuple(dict.fromkeys(group for group in groups if group is not None))


@dataclass(frozen=True, slots=True, kw_only=True)
class HostGroups:
    """``inside`` joins the ranks of this host, ``between`` the first ones of all hosts: None on the others."""

    inside: Communicator
    between: Communicator | None
    hosts: int

    @classmethod
    def of(cls, communicator: Communicator, hosts: Sequence[Sequence[int]]) -> HostGroups:
        """Return the groups of this rank of ``communicator``.  Nothing is sent.

        ``hosts`` are its ranks by host, such as ``communicator.hosts``, or by node; every rank is in exactly one.
        """
        ranks = sorted(rank for host in hosts for rank in host)
        if ranks != list(range(communicator.size)):
            raise UsageError(f"hosts: expected each of {communicator.size} ranks once, got {ranks}")
        own = next(host for host in hosts if communicator.rank in host)
        return cls(
            inside=_member(communicator, own, f"host/{own[0]}"),
            between=communicator.subgroup([host[0] for host in hosts], key="leaders"),
            hosts=len(hosts),
        )

    @property
    def all(self) -> tuple[Communicator, ...]:
        return (self.inside,) if self.between is None else (self.inside, self.between)


def make_groups(config: ThreeDParallelismConfig, mapping: RankMapping, communicator: Communicator) -> SyncGroups:
    """Return the groups of a rank.  Nothing is sent.

    Raises ``UsageError`` unless ``communicator`` joins exactly the ranks of ``config``, in their order.
    """
    if communicator.size != config.world_size:
        sizes = "dp_size" if config.world_size == config.dp_size else "dp_size * tp_size * pp_size"
        raise UsageError(f"communicator: expected {config.world_size} ranks ({sizes}), got {communicator.size}")
    if communicator.rank != mapping.global_rank:
        raise UsageError(
            f"rank_mapping: expected global_rank {communicator.rank} (the communicator's rank), "
            f"got {mapping.global_rank}"
        )
    if config.world_size == config.dp_size:
        partitions: Partitions = {REPLICAS: (range(communicator.size),)}
        return SyncGroups(everyone=communicator, replicas=communicator, partitions=partitions)
    ids, dp, tp, pp = ProcessGroupIds(config), mapping.dp_rank, mapping.tp_rank, mapping.pp_rank
    pipeline, stages = mapping.pp_group_ranks(), config.pp_size
    is_end = stages > 1 and (mapping.is_pp_head() or mapping.is_pp_tail())
    pipelines = config.rank_order().groups("pp")
    return SyncGroups(
        partitions={
            EVERYONE: (range(communicator.size),),
            REPLICAS: config.rank_order().groups("dp"),
            SLICES: config.rank_order().groups("tp"),
            ENDS: [(ranks[0], ranks[-1]) for ranks in pipelines],
        },
        everyone=communicator,
        replicas=_member(communicator, mapping.dp_group_ranks(), ids.get_dp_group_id(tp, pp)),
        tp=_member(communicator, mapping.tp_group_ranks(), ids.get_tp_group_id(dp, pp)) if config.tp_size > 1 else None,
        embedding=_member(communicator, (pipeline[0], pipeline[-1]), f"{ids.get_pp_group_id(dp, tp)}_ends")
        if is_end
        else None,
    )


def split_by_host(replicas: Communicator) -> HostGroups | None:
    """Return the groups for a reduction inside hosts first; None where that is no use.

    That is, where all ranks share a host, or none shares its host with another.
    """
    return HostGroups.of(replicas, replicas.hosts) if shares_some_hosts(replicas.hosts) else None


def shares_some_hosts(hosts: Hosts) -> bool:
    """Are ``hosts`` several, and one of them that of several ranks?"""
    return 1 < len(hosts) < sum(map(len, hosts))


def _member(communicator: Communicator, ranks: Sequence[int], key: str) -> Communicator:
    group = communicator.subgroup(ranks, key=key)
    assert group is not None, "this rank is one of them"
    return group
