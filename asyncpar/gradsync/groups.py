"""Groups of ranks that reduce gradients together."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from asyncpar.agreement.exchanges import Partitions
from asyncpar.collectives.algorithms.hierarchical import Hosts
from asyncpar.collectives.communicator import Communicator
from asyncpar.collectives.subgroups import hosts_of
from asyncpar.core.config.parallel import RankMapping, ThreeDParallelismConfig
from asyncpar.errors import ProtocolError, UsageError
from asyncpar.gradsync.plan import Bucket, GradientSpec
from asyncpar.tensors.process_groups import ProcessGroups

ALL_RANKS, REPLICAS, TENSOR_PARALLEL, EMBEDDING = "everyone", "dp", "tp", "pp"
"""Kinds of groups."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncGroups:
    """``everyone`` joins all ranks of the configuration, ``replicas`` those with this rank's slice of this stage.

    ``tp`` joins the tensor-parallel ranks of this replica and stage, ``embedding`` the first and the last stage of this
    rank's pipeline; None if that is one rank, and ``embedding`` also on the stages in between.
    """

    everyone: Communicator
    replicas: Communicator
    tp: Communicator | None = None
    embedding: Communicator | None = None
    partitions: Partitions = field(default_factory=dict)
    """All groups of each kind in which ranks must agree, including those without this rank."""
    is_end: bool = True
    """Whether this rank holds the first or the last virtual stage."""

    @classmethod
    def of(cls, config: ThreeDParallelismConfig, mapping: RankMapping, communicator: Communicator) -> SyncGroups:
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
        everyone = (range(communicator.size),)
        if config.world_size == config.dp_size:
            return cls(everyone=communicator, replicas=communicator, partitions={REPLICAS: everyone})
        groups, order, ends = ProcessGroups.of(config, mapping, communicator), config.rank_order(), config.end_stages
        return cls(
            partitions={
                ALL_RANKS: everyone,
                REPLICAS: order.groups("dp"),
                TENSOR_PARALLEL: order.groups("tp"),
                EMBEDDING: [[ranks[stage] for stage in ends] for ranks in order.groups("pp")],
            },
            everyone=communicator,
            replicas=groups.dp,
            tp=groups.tp if config.tp_size > 1 else None,
            embedding=groups.embedding if len(ends) > 1 else None,
            is_end=mapping.pp_rank in ends,
        )

    @property
    def is_data_parallel_only(self) -> bool:
        """Whether all ranks are replicas."""
        return self.everyone.size == self.replicas.size

    @property
    def host_patterns(self) -> frozenset[Hosts]:
        """The layouts of groups of replicas on hosts, each as places in the group by host; equal on all ranks."""
        hosts = self.everyone.hosts
        return frozenset(hosts_of(hosts, tuple(ranks)) for ranks in self.partitions[REPLICAS])

    def check_ties(self, specs: Iterable[GradientSpec]) -> None:
        """Raise ``UsageError`` for a tied parameter on a rank that would not add it up with the other copy."""
        for spec in specs:
            if spec.placement.tied is not None and not self.is_end:
                raise UsageError(
                    f"parameter {spec.name}: expected a tie only on ranks with the first or the last virtual stage of "
                    f"the configuration's pipeline_schedule, got one on another rank"
                )

    @property
    def all(self) -> tuple[Communicator, ...]:
        """Every group, each once."""
        groups = [self.everyone, self.replicas, self.tp, self.embedding]
        return tuple(dict.fromkeys(group for group in groups if group is not None))


@dataclass(frozen=True, slots=True, kw_only=True)
class HostGroups:
    """The groups of ``world`` by host, or by node of several hosts' worth of ranks.

    ``inside`` joins the ranks of this host, ``between`` the leaders, which are the first ranks of all hosts: None on
    the others.  ``hosts`` is their number.
    """

    world: Communicator
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
            world=communicator,
            inside=_member(communicator, own, f"host/{own[0]}"),
            between=communicator.subgroup([host[0] for host in hosts], key="leaders"),
            hosts=len(hosts),
        )

    @property
    def all(self) -> tuple[Communicator, ...]:
        return (self.inside,) if self.between is None else (self.inside, self.between)


def split_by_host(replicas: Communicator) -> HostGroups | None:
    """Return the groups for a reduction inside hosts first; None if that is useless.

    It is useless where all ranks share a host, or no two ranks do.
    """
    return HostGroups.of(replicas, replicas.hosts) if shares_some_hosts(replicas.hosts) else None


def shares_some_hosts(hosts: Hosts) -> bool:
    """Return whether there are several ``hosts``, at least one with several ranks."""
    return 1 < len(hosts) < sum(map(len, hosts))


def _member(communicator: Communicator, ranks: Sequence[int], key: str) -> Communicator:
    group = communicator.subgroup(ranks, key=key)
    assert group is not None, "this rank is one of them"
    return group


_STEPS_BITS = 32
"""Bits of the number of steps between two restarts."""


class Name:
    """The name of a collective, completed on use: by then ranks have agreed on the epoch, which is part of it.

    Its string is the name, so build ``f"{name}/shards"`` only where the collective begins.
    """

    def __init__(self, keys: Keys, rest: str) -> None:
        self._keys = keys
        self._rest = rest

    def __str__(self) -> str:
        return f"{self._keys.prefix}/{self._keys.epoch}/{self._rest}"

    def __truediv__(self, rest: str) -> Name:
        return Name(self._keys, f"{self._rest}/{rest}")

    def other(self, rest: str) -> Name:
        """Return another name in the same step."""
        return Name(self._keys, rest)


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketKeys:
    """Prefixes of one bucket's names, over replicas, tensor-parallel ranks and both ends of a pipeline."""

    replicas: Name
    tp: Name
    embedding: Name


@dataclass(slots=True)
class Keys:
    """Names for the steps of the synchronizer ``name``.

    Every rank uses the names of the comparison and of its notice exactly once per step, whatever happens in it.  All
    other names begin with the epoch: a step that fails on a rank begins a new one there, and in the next comparison all
    ranks take over the latest.  So it does not matter which names a rank has used up in steps that failed.
    """

    name: str
    steps: int = 0
    epoch: int = 0
    restarts: int = 0
    has_measured: bool = False
    """Whether an earlier comparison, before a measurement, has used the name of the comparison in this step."""

    @property
    def comparison(self) -> str:
        return f"{self.rare}/agreement" if self.has_measured else f"{self.prefix}/agreement"

    @property
    def changes(self) -> str:
        """The name of the notice of a rank that does not take the step as the others expect; used once per step."""
        return f"{self.prefix}/changes"

    @property
    def ending(self) -> Name:
        return Name(self, "ending")

    @property
    def rare(self) -> str:
        """The prefix of names that are used in this step only."""
        return f"{self.prefix}/step/{self.steps}"

    @property
    def prefix(self) -> str:
        """The prefix of all names since the last ``restart``."""
        return f"{self.name}/restart/{self.restarts}" if self.restarts else self.name

    def begin_step(self) -> None:
        """Advance to the next step."""
        self.steps += 1
        self.has_measured = False

    def restart(self, number: int) -> None:
        """Start again, with separate names and steps for each ``number``."""
        self.restarts, self.steps, self.epoch = number, number << _STEPS_BITS, 0
        self.has_measured = False

    def bucket(self, bucket: Bucket) -> BucketKeys:
        """Return the names of a bucket."""
        return BucketKeys(
            replicas=Name(self, f"bucket/{bucket.index}"),
            tp=Name(self, f"tp/{bucket.shared_name}"),
            embedding=Name(self, f"pp/{bucket.shared_name}"),
        )

    def adopt(self, epoch: int) -> None:
        """Continue in ``epoch``, the latest of all ranks.  Raises ``ProtocolError`` for an impossible one."""
        if epoch > self.steps:
            raise ProtocolError(f"gradients: expected at most one failed step in each of {self.steps}, got {epoch}")
        self.epoch = max(self.epoch, epoch)
