"""Values that agents and the coordinator exchange: frozen, without a transport."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentHello:
    """The introduction of an agent.  ``node_rank`` None: any free place."""

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
    """The exit code of the launcher and the message that it prints (none after success)."""

    exit_code: int
    message: str = ""
