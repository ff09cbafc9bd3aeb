"""The groups of a multi-node world: all ranks, those of one node, and the first ranks of all nodes."""

from __future__ import annotations

from dataclasses import dataclass

from asyncpar.agreement.comparison import compare
from asyncpar.collectives.communicator import Communicator
from asyncpar.errors import UsageError
from asyncpar.gradsync import HostGroups
from asyncpar.multinode.config import MultiNodeConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeGroups:
    """``node`` joins the ranks of this node, ``leaders`` the first ranks of all nodes: None on the others."""

    world: Communicator
    node: Communicator
    leaders: Communicator | None
    num_nodes: int

    @classmethod
    def of(cls, config: MultiNodeConfig, world: Communicator) -> NodeGroups:
        """Return the groups of this rank.  Nothing is sent; ``config`` must fit ``world`` (see ``check_world``)."""
        groups = HostGroups.of(world, config.nodes())
        return cls(world=world, node=groups.inside, leaders=groups.between, num_nodes=config.num_nodes)

    @property
    def as_hosts(self) -> HostGroups | None:
        """The groups that gradients are reduced in, node by node; None where there is one node only."""
        if self.num_nodes == 1:
            return None
        return HostGroups(inside=self.node, between=self.leaders, hosts=self.num_nodes)


async def check_world(config: MultiNodeConfig, world: Communicator, settings: tuple[str, ...], *, key: str) -> None:
    """Raise ``UsageError``, on every rank, unless ``config`` fits ``world`` and is the same on all its ranks.

    ``settings`` are what must be equal besides.  All ranks of ``world`` call it.
    """
    problem = misfit(config, world)
    lines = (*config.describe(), *settings, "its place in the world" if problem is None else f"an error: {problem}")
    await compare(world, lines, key=key)
    if problem is not None:
        raise UsageError(problem)


def misfit(config: MultiNodeConfig, world: Communicator) -> str | None:
    """Return what is wrong with ``config`` in ``world``, None if nothing is."""
    if config.world_size != world.size:
        return (
            f"num_nodes, devices_per_node: expected {world.size} ranks in all, as the communicator has, "
            f"got {config.num_nodes} * {config.devices_per_node}"
        )
    if config.global_rank != world.rank:
        return f"global_rank: expected {world.rank}, the communicator's rank, got {config.global_rank}"
    for number, node in enumerate(config.nodes()):
        firsts = [min(here) for host in world.hosts if (here := set(host) & set(node))]
        if len(firsts) > 1:
            return (
                f"devices_per_node: expected the ranks of node {number}, {_listed(node)}, on one host, "
                f"but rank {firsts[0]} and rank {firsts[1]} are on two"
            )
    return None


def _listed(ranks: tuple[int, ...]) -> str:
    return ", ".join(map(str, ranks)) if len(ranks) <= 8 else f"{ranks[0]} to {ranks[-1]}"
