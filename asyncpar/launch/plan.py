"""What agents and the coordinator tell each other: frozen, transport-free."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentHello:
    """An agent introduces itself.  ``node_rank`` None: any place that is free."""

    job: str
    nnodes: int
    nproc: int
    node_rank: int | None
    host: str


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentAssignment:
    """The place of one agent's ranks in one generation of the world.

    Its local rank ``l`` is rank ``rank_offset + l``.  ``master_addr`` and ``master_port`` are for scripts that bring
    a rendezvous of their own; the port was free when it was chosen.
    """

    generation: int
    restart_count: int
    group_rank: int
    group_world_size: int
    rank_offset: int
    world_size: int
    master_addr: str = ""
    master_port: int = 0


@dataclass(frozen=True, slots=True)
class JobOutcome:
    """How the launcher ends: its exit code, and what to tell people (nothing when all went well)."""

    exit_code: int
    message: str = ""
