"""Views of agents for users: hosts, ranks, worlds, reasons.  Plain values, as JSON and as text."""

from __future__ import annotations

import textwrap

import msgspec

from asyncpar.bench.table import Column, choose_columns, format_row, format_titles
from asyncpar.harmless import harmless_line, harmless_values


class RankView(msgspec.Struct, frozen=True, kw_only=True):
    """One slot of a host.  ``rank`` None: it is in no world now; ``pid`` None: no process runs.

    If ``is_spare``, it waits for the place of another.  ``refusal``: why the others do not admit it; "" if they do.
    """

    slot: int
    rank: int | None
    pid: int | None
    restarts: int
    is_spare: bool = False
    refusal: str = ""


class HostView(msgspec.Struct, frozen=True, kw_only=True):
    """One host of the group.

    ``state`` is ``up``, ``draining``, ``witness`` (it votes only), ``waiting`` (the job has all its hosts, without this
    one) or ``unknown`` (its agent did not answer).
    """

    name: str
    address: str
    state: str
    is_leader: bool
    is_voter: bool
    version: str = ""
    ranks: tuple[RankView, ...] = ()
    failure: str = ""
    """The failure of ranks of the last job here after it was complete; "": none."""


class JobView(msgspec.Struct, frozen=True, kw_only=True):
    """The last job; ``state`` is ``running``, ``ending`` (it is over, and ranks still run) or ``over``."""

    number: int
    name: str
    mode: str
    nnodes: str
    state: str
    exit_code: int | None = None
    message: str = ""


class GroupView(msgspec.Struct, frozen=True, kw_only=True):
    """The group, as seen by the agent that was asked."""

    leader: str | None
    hosts: tuple[HostView, ...]
    job: JobView | None = None
    generation: int | None = None
    world_size: int = 0
    world_hosts: int = 0
    """The number of hosts that have members in the world."""
    change: str = ""
    parked: str = ""
    is_for_one_job: bool = False
    """Whether its agents are launchers, which end with their job."""


Row = tuple[HostView, RankView | None]
_COLUMNS: tuple[Column[Row], ...] = (
    Column(title="host", unit="", width=16, worth=10, show=lambda row: row[0].name[:16]),
    Column(title="state", unit="", width=9, worth=8, show=lambda row: row[0].state),
    Column(title="role", unit="", width=7, worth=6, show=lambda row: _role(row[0])),
    Column(title="slot", unit="", width=5, worth=7, show=lambda row: _of(row[1], "slot")),
    Column(title="rank", unit="", width=5, worth=9, show=lambda row: _rank(row[1])),
    Column(title="pid", unit="", width=8, worth=4, show=lambda row: _of(row[1], "pid")),
    Column(title="restarts", unit="", width=9, worth=5, show=lambda row: _of(row[1], "restarts")),
    Column(title="address", unit="", width=22, worth=3, show=lambda row: row[0].address),
)


def _role(host: HostView) -> str:
    return "leader" if host.is_leader else "voter" if host.is_voter else "-"


def _rank(rank: RankView | None) -> str:
    return "spare" if rank is not None and rank.is_spare else _of(rank, "rank")


def _of(rank: RankView | None, name: str) -> str:
    value = None if rank is None else getattr(rank, name)
    return "-" if value is None else str(value)


def show_group(view: GroupView, *, width: int | None) -> str:
    """Return the text to print; lines have at most ``width`` characters, None for no limit."""
    lines = [part for text in _sentences(view) for part in _wrap(harmless_line(text), width)]
    columns = choose_columns(_COLUMNS, width)
    rows: list[Row] = [(host, rank) for host in harmless_values(view.hosts) for rank in host.ranks or (None,)]
    return "\n".join([*lines, "", *format_titles(columns), *(format_row(row, columns) for row in rows), ""])


def _sentences(view: GroupView) -> list[str]:
    leader = f"leader {view.leader}" if view.leader else "no leader is known"
    count = len(view.hosts)
    texts = [f"{count} host{'s' if count != 1 else ''}; {leader}"]
    if view.parked:
        texts.append(f"parked: {view.parked}")
    job = view.job
    if job is None:
        return [*texts, "no job"]
    end = "" if job.exit_code is None else f", exit code {job.exit_code}"
    texts.append(f"job {job.number} {job.name!r} (--elastic {job.mode}, --nnodes {job.nnodes}): {job.state}{end}")
    texts += [line for line in job.message.splitlines()[:1] if line]
    texts += [
        f"rank {host.name}/{rank.slot} is not admitted: {rank.refusal}"
        for host in view.hosts
        for rank in host.ranks
        if rank.refusal
    ]
    if view.generation is not None:
        texts.append(f"generation {view.generation}: {view.world_size} members")
        texts += [f"last change: {view.change}"] if view.change else []
    return texts


def _wrap(text: str, width: int | None) -> list[str]:
    return [text] if width is None else textwrap.wrap(text, width)
