"""Synthetic jobs: the reports of launchers on a job of any size, second by second, for tests of displays of jobs."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from enum import StrEnum

from asyncpar.core.observe.records import RankIdentity
from asyncpar.observe.pipeline_runs import ActionSummary, PipelineSummary, RunSummary
from asyncpar.observe.summary import (
    AskSummary,
    BlockedSummary,
    FigureSummary,
    GradientSummary,
    HostSummary,
    JobSummary,
    LetterSummary,
    LinkSummary,
    MailboxSummary,
    OperationSummary,
    ProgressSummary,
    RankReport,
    RankSummary,
    RoundSummary,
)
from asyncpar.pipeline.registry import make_schedule
from asyncpar.pipeline.simulation import Costs, OperationSpan, simulate

_START = 1_790_000_000.0
_STEPS_PER_SECOND = 8.3
_BYTES_PER_STEP = 25_000_000
_LETTERS = (
    LetterSummary(sender=0, rank=2, actor="logger", endpoint="write", reason="the actor has ended: it was stopped"),
    LetterSummary(sender=1, rank=2, actor="logger", endpoint="flush", reason="the actor has ended: it was stopped"),
)


class Trouble(StrEnum):
    """The faults of a synthetic job from second 40 on; ``rounds`` takes them in turn, 20 s each, with pauses."""

    NOTHING = "nothing"
    LATE = "late"
    BLOCKED = "blocked"
    STOPPED = "stopped"
    FAILED = "failed"
    ROUNDS = "rounds"


class SyntheticJob:
    """A training job of ``size`` ranks, ``per_host`` on each host.

    ``trouble`` affects it from second 40 on; an equal ``seed`` gives an equal job.
    """

    def __init__(self, size: int, *, per_host: int = 8, trouble: Trouble = Trouble.NOTHING, seed: int = 0) -> None:
        if size < 1 or per_host < 1:
            raise ValueError(f"size and per_host: expected at least 1, got {size} and {per_host}")
        self._size, self._per_host, self._trouble = size, per_host, trouble
        self._random = random.Random(seed)
        self._culprit = min(size - 1, size // 3)

    def summaries(self, seconds: int) -> Iterator[JobSummary]:
        """Yield a summary for each second."""
        steps = 0.0
        since = 0
        for second in range(seconds):
            trouble = self._trouble_at(second)
            since = since + 1 if trouble in (Trouble.LATE, Trouble.STOPPED, Trouble.BLOCKED, Trouble.FAILED) else 0
            steps += 0.0 if since else _STEPS_PER_SECOND * (1 + 0.05 * self._random.random())
            yield self._job(second, steps, trouble, float(since))

    def _trouble_at(self, second: int) -> Trouble:
        if second < 40:
            return Trouble.NOTHING
        if self._trouble is not Trouble.ROUNDS:
            return self._trouble
        turn, at = divmod(second - 40, 30)
        return (Trouble.LATE, Trouble.BLOCKED, Trouble.STOPPED)[turn % 3] if at < 20 else Trouble.NOTHING

    def _job(self, second: int, steps: float, trouble: Trouble, since: float) -> JobSummary:
        hosts = [
            HostSummary(
                host=_host(first // self._per_host),
                ranks=tuple(
                    self._report(rank, second, steps, trouble, since)
                    for rank in range(first, min(self._size, first + self._per_host))
                ),
            )
            for first in range(0, self._size, self._per_host)
        ]
        return JobSummary(
            job="gpt-small",
            pid=4000,
            time=_START + second,
            started=_START - 6.0,
            phase="running",
            command=("train.py", "--layers", "12"),
            nnodes=len(hosts),
            world_size=self._size,
            hosts=tuple(hosts),
        )

    def _report(self, rank: int, second: int, steps: float, trouble: Trouble, since: float) -> RankReport:
        host, pid = _host(rank // self._per_host), 4100 + rank
        is_culprit = rank == self._culprit and since > 0.0
        if is_culprit and trouble is Trouble.FAILED:
            return RankReport(
                rank=rank, host=host, pid=pid, condition="ended", seconds=since, ending="was killed by SIGKILL"
            )
        is_stopped = is_culprit and trouble is Trouble.STOPPED
        return RankReport(
            rank=rank,
            host=host,
            pid=pid,
            local_rank=rank % self._per_host,
            condition="stopped" if is_stopped else "well",
            seconds=since if is_stopped else 0.0,
            phase="member",
            age=since if is_stopped else 0.2,
            summary=self._summary(rank, second, steps, trouble, since),
        )

    def _summary(self, rank: int, second: int, steps: float, trouble: Trouble, since: float) -> RankSummary:
        is_culprit = rank == self._culprit
        is_blocked = is_culprit and trouble is Trouble.BLOCKED and since > 0.0
        operations = self._operations(rank, steps, since)
        return RankSummary(
            rank=rank,
            pid=4100 + rank,
            time=_START + second + 0.01 * rank,
            host=_host(rank // self._per_host),
            world_size=self._size,
            phase="member",
            loop_lag=since if is_blocked else 0.0002 + 0.0006 * self._random.random(),
            blocked=BlockedSummary(what="json.load", where="data.py:112", seconds=since) if is_blocked else None,
            cpu=0.93 * second + 0.2 * self._random.random(),
            rss=int(1.6e9 + 2e8 * math.sin(rank) + 1e6 * second),
            arena=192_000_000,
            gc=0.004 * second,
            operations_done={"arena": int(steps * 40), "messages": int(steps * 6)},
            bytes_moved={"arena": int(steps * _BYTES_PER_STEP), "messages": int(steps * _BYTES_PER_STEP / 4)},
            operations=operations,
            user_site="train.py:57" if is_culprit or not operations else "",
            progress=ProgressSummary(description="steps", completed=float(int(steps)), total=5000.0),
            values={"loss": 2.0 + 8.5 * math.exp(-steps / 400) + 0.05 * self._random.random(), "lr": 3e-4}
            if rank == 0
            else {},
            mailboxes=(MailboxSummary(actor="sampler", waiting=3 + rank % 5),) if rank % 4 == 0 else (),
            asks=self._asks(rank),
            serving=((0, 3),) if rank == self._size - 1 else (),
            dead_letters=3 if rank == 2 else 0,
            letters=_LETTERS if rank == 2 else (),
            links=self._links(rank, steps),
            rounds=tuple(
                RoundSummary(number, 96_000 - 2_000 * (rank % 5), 121_000, {})
                for number in range(int(steps), int(steps) + 4)
            ),
            gradients=GradientSummary(0.81 - 0.02 * (rank % 3), 3.94),
            figures=(
                FigureSummary(
                    "collective",
                    "all_reduce",
                    "arena",
                    1 << 25,
                    64,
                    8_200 + 40 * (rank % 7),
                    11_900,
                    4_790_000_000,
                    7_400,
                ),
                *(
                    FigureSummary("bucket", f"bucket {number}", "int8", 1 << 23, 24, 2_900 + 70 * number + rank, 4_100)
                    for number in range(4)
                ),
                FigureSummary("pipeline", "forward", "", 0, 96, 7_100 + 90 * (rank % 3), 9_000),
                FigureSummary("pipeline", "backward_input", "", 0, 96, 8_000 + 70 * (rank % 3), 9_900),
                FigureSummary("pipeline", "backward_weight", "", 0, 96, 6_600 + 50 * (rank % 3), 8_000),
                FigureSummary("pipeline", "recv_activation", "", 0, 96, 700 + 900 * (rank % 4), 4_000),
                FigureSummary("span", "load", "", 0, 12, 410, 2_300),
            ),
        )

    def _operations(self, rank: int, steps: float, since: float) -> tuple[OperationSummary, ...]:
        is_culprit = rank == self._culprit
        if is_culprit and (since or self._random.random() < 0.7):
            return ()
        if not since and self._random.random() < 0.6:
            return ()
        number = int(steps * 12)
        return (
            OperationSummary(
                label=f"all_reduce #{number}",
                kind="all_reduce",
                group="world",
                sequence=number,
                text="all_reduce(float32[6553600], sum)",
                dtype="float32",
                bytes=26_214_400,
                waits_for=(self._culprit,) if since else (),
                seconds=since or 0.02,
                site="train.py:61",
            ),
        )

    def _asks(self, rank: int) -> tuple[AskSummary, ...]:
        """Return calls of a sampler on rank 0 to a store on the last rank."""
        if rank % 4 == 1:
            return (AskSummary(rank=0, actor="sampler", endpoint="draw", seconds=0.4, site="data.py:88", call=7),)
        if rank or self._size == 1:
            return ()
        return (
            AskSummary(
                rank=self._size - 1,
                actor="store",
                endpoint="read",
                seconds=0.3,
                site="sampler.py:31",
                call=3,
                caller="sampler",
                serves=(1, 7),
                is_holding=True,
            ),
        )

    def _links(self, rank: int, steps: float) -> tuple[LinkSummary, ...]:
        peers = [peer for peer in range(min(self._size, 65)) if peer != rank][:64]
        return tuple(
            LinkSummary(
                peer=peer,
                lane="unix" if peer // self._per_host == rank // self._per_host else "tcp",
                bytes=int(steps * _BYTES_PER_STEP / len(peers) * (1 + (rank * 7 + peer) % 5)),
                rtt=(14e-6 if peer // self._per_host == rank // self._per_host else 90e-6)
                * (1 + ((rank + peer) % 7) / 7),
            )
            for peer in peers
        )


def record_pipeline(
    stages: int, *, micro_batches: int, chunks: int = 1, runs: int = 1, schedule: str = ""
) -> list[PipelineSummary]:
    """Return the reports of the ranks of a pipeline on their last runs, in which a forward pass takes 7 ms.

    ``schedule`` is the name of one ("": one forward, one backward, interleaved for several ``chunks`` on a rank).
    """
    name = schedule or ("interleaved_one_f1b" if chunks > 1 else "one_forward_one_backward")
    made = make_schedule(name, num_stages=stages, num_microbatches=micro_batches, num_model_chunks=chunks)
    ran = simulate(made, Costs(forward=0.007, backward_input=0.008, backward_weight=0.006), latency=0.0004)
    return [
        PipelineSummary(
            identity=RankIdentity(rank=rank, size=stages, host=_host(rank // 8), clock_domain="one", wall=_START),
            ranks=tuple(range(stages)),
            runs=tuple(
                RunSummary(number, tuple(_action(span, number * ran.makespan) for span in spans))
                for number in range(1, runs + 1)
            ),
        )
        for rank, spans in enumerate(ran.spans)
    ]


def _action(span: OperationSpan, start: float) -> ActionSummary:
    done = span.operation
    return ActionSummary(str(done.kind), done.stage, done.micro_batch, start + span.start, start + span.end)


def _host(place: int) -> str:
    return f"node-{place:02d}"
