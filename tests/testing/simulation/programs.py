"""Small programs for simulations."""

from __future__ import annotations

import asyncio
import random
import secrets
import time
import uuid

import numpy as np

import asyncpar as ap
from asyncpar.core.config.transport import LINK_SECONDS
from asyncpar.hosts.next_world import UNREACHABLE_WORLDS
from asyncpar.testing.simulation import SimulationResult, note

STEPS = 3


async def sums(node: ap.Node) -> list[float]:
    """Reduce a bit per rank and step: the sum shows who contributed to which step."""
    seen = []
    for step in range(STEPS):
        x = np.full(64, float(1 << (node.rank + 8 * step)), np.float64)
        await node.world.all_reduce(x)
        seen.append(float(x[0]))
    return seen


def check_sums(result: SimulationResult) -> None:
    """Each sum holds each rank once."""
    for seen in result.results.values():
        assert seen == [float(((1 << result.size) - 1) << (8 * step)) for step in range(STEPS)], seen


def check_named(result: SimulationResult) -> None:
    """A rank that is named as lost had a fault, or ended because of one, unless the one that names it had one."""
    faulty = {node for fault in result.faults for node in fault.nodes}
    for node, error in result.errors.items():
        if isinstance(error, ap.PeerLost) and error.rank is not None and node not in faulty:
            assert error.rank in {*faulty, *result.errors}, (
                f"node {node} names {error.rank}, which had no fault: {error}"
            )


class Counter(ap.Actor):
    """Counts, and remembers who asked."""

    def __init__(self) -> None:
        self.count = 0
        self.askers: list[int] = []

    @ap.endpoint
    async def add(self, rank: int) -> int:
        self.count += 1
        self.askers.append(rank)
        return self.count


def compute() -> list[float]:
    """Take a while."""
    time.sleep(0.01)
    return [random.random(), time.monotonic()]


async def everything(node: ap.Node) -> list[object]:
    """Use what a program can use: collectives, actors, clocks, random words, threads, sets, tasks."""
    if node.rank == 0:
        await node.spawn(Counter, name="counter")
    await node.world.barrier()
    counter = node.ref("counter", 0, actor_class=Counter)
    counts = await asyncio.gather(*(counter.add(node.rank) for _ in range(3)))
    x = np.random.default_rng().standard_normal(50_000).astype(np.float32)
    await node.world.all_reduce(x)
    words = [secrets.token_hex(4), uuid.uuid4().hex, random.random(), np.random.rand()]
    clocks = [time.monotonic(), time.time(), time.perf_counter_ns()]
    computed = await asyncio.to_thread(compute)
    async with asyncio.TaskGroup() as group:
        tasks = {group.create_task(asyncio.sleep(random.random() / 100, n)) for n in range(5)}
    return [counts, x[:3].tolist(), words, clocks, computed, [task.result() for task in tasks]]


WORLDS_OF_A_FAULT = 3
"""One without who is lost, one with who comes for it, and one if the loss was found out in between."""

PORTIONS = 8
UNTIL = 6
WHOLE = float((1 << PORTIONS) - 1)


Ends = tuple[float, tuple[int, ...], bytes]
"""The total, the random numbers and the digest that a rank comes to."""


async def bits(ballast: int = 1, seconds: float = 0.005, until: int = UNTIL) -> Ends | None:
    """Sum one bit per portion in each of some steps, elastically; note every step that is committed.

    Returns None where the job was complete before this rank had the state.
    ``ballast`` is a number of numbers that change in every step, too; each portion takes so many ``seconds``.
    """
    heavy = np.zeros(ballast, np.float64)
    total, rng = np.zeros(1, np.float64), np.random.default_rng(3)
    async with ap.elastic(portions=PORTIONS, seed=5) as job:
        state = job.state({"total": total, "heavy": heavy}, rng=rng, steps=[], draws=[])
        async for step in job.steps(state, until=until):
            async with step:
                portions = tuple(step.portions)
                for portion in portions:
                    gradients = {"total": np.array([float(1 << portion)])}
                    if ballast > 1:
                        gradients["heavy"] = np.ones(ballast)
                    step.add(portion, gradients, loss=1.0)
                    await asyncio.sleep(seconds)
                state["draws"].append(float(rng.random()))
                summed = await step.reduce("sum")
                total += summed["total"] * (step.number + 1)
                heavy += 1.0
                state["steps"].append([step.number, float(summed["total"][0]), step.loss])
            if step.is_committed:
                lineage = await state.lineage()
                note(
                    ("committed", step.number, lineage.digest, float(total[0]), step.is_replay, step.began_in, portions)
                )
            if step.change is not None:
                note(("changed", step.change.generation, step.change.left))
        if job.is_drained:
            return None
        return float(total[0]), tuple(state["draws"]), (await state.lineage()).digest


WITHIN = 10.0
"""Virtual seconds after the last fault within which another step is committed."""
QUARREL = UNREACHABLE_WORLDS * LINK_SECONDS + 1.0
"""The same where two members do not reach each other: in so many worlds each link has to be silent for its time."""


def check_goes_on(result: SimulationResult, until: int = UNTIL) -> None:
    """Soon after the last fault the next step is committed, if anybody is left."""
    last = max((fault.at + (fault.seconds or 0.0) for fault in result.faults), default=0.0)
    commits = [entry for entry in result.notes if entry.content[0] == "committed" and not entry.content[4]]
    ends = [entry.at for entry in commits if entry.content[1] == until - 1]
    if not ends or min(ends) <= last:
        return
    after = min(entry.at for entry in commits if entry.at > last) - last
    are_quarrels = any(fault.kind in ("silence", "one_way") for fault in result.faults)
    assert after <= (QUARREL if are_quarrels else WITHIN), (
        f"nothing was committed for {after:.1f} s after the last fault"
    )


def check_changes(result: SimulationResult, until: int = UNTIL) -> None:
    """Who is lost had to do with a fault, or was done; and there are not more worlds than that explains."""
    faulty = {node for fault in result.faults for node in (fault.node, fault.peer)}
    if any(fault.kind == "isolate" for fault in result.faults):  # either side of a cut may go on
        faulty |= set(range(result.size))
    ends = [entry for entry in result.notes if entry.content[:2] == ("committed", until - 1)]
    done = {entry.node for entry in ends}
    newest, ended = 0, set()
    for entry in result.notes:
        if entry.content[0] == "changed":
            _, generation, left = entry.content
            newest = max(newest, generation)
            nodes = {int(name.partition("/")[0][1:]) for name in left}
            assert nodes <= done | faulty, f"{left} left, and not all of them had a fault"
            if nodes and nodes <= done:
                ended.add(generation)
    most = 1 + WORLDS_OF_A_FAULT * len(result.faults) + len(ended)
    assert newest <= most, f"{newest} worlds came of {len(result.faults)} faults"


FATAL = ("kill", "kill_agent", "crash", "restart")


def is_total_loss(result: SimulationResult, at: float) -> bool:
    """Every node has lost its process by then: what was committed may be lost, and a job begins anew."""
    lost = {fault.node for fault in result.faults if fault.kind in FATAL and fault.at < at}
    return len(lost) == result.size


def check_bits(result: SimulationResult, until: int = UNTIL) -> None:
    """One lineage per committed step; what is committed is kept; each sum holds each portion once; equal ends.

    Each process commits step after step, and each portion once; who is lost had to do with a fault; so many worlds come
    of so many faults; after the last one it goes on soon.  Where all processes are lost, steps may be done again.
    """
    known: dict[int, tuple[bytes, float]] = {}
    worlds: dict[int, int] = {}
    last: dict[tuple[int | None, int], int] = {}
    portions: dict[int, list[int]] = {}
    check_changes(result, until)
    check_goes_on(result, until)
    for entry in result.notes:
        if entry.content[0] != "committed":
            continue
        _, step, digest, total, is_replay, world, computed = entry.content
        process = entry.node, entry.incarnation
        assert step > last.get(process, -1), f"{process} committed step {step} after {last[process]}"
        if not is_replay and world != worlds.get(step, world) and is_total_loss(result, entry.at):
            del worlds[step], portions[step]
        if not is_replay:
            assert step == last.get(process, step - 1) + 1, f"{process} committed step {step} after {last[process]}"
            last[process] = step
            portions.setdefault(step, []).extend(computed)
            assert len(set(portions[step])) == len(portions[step]), f"step {step}: portions {portions[step]}"
            assert worlds.setdefault(step, world) == world, f"step {step} was done again after it was committed"
        assert known.setdefault(step, (digest, total)) == (digest, total), f"step {step} was committed twice: {entry}"
        assert total == WHOLE * (step + 1) * (step + 2) / 2, f"step {step} came to {total}"
    ends = [value for value in result.results.values() if value is not None]
    dead = {fault.node for fault in result.faults if fault.kind in FATAL}
    assert ends or len(dead) == result.size, "no rank has come to the end"
    for value in ends:
        assert value[0] == WHOLE * until * (until + 1) / 2, f"the end is {value[0]}"
        assert value[1] == tuple(np.random.default_rng(3).random(until).tolist()), "random numbers were drawn twice"
    assert len(set(ends)) <= 1, f"ends differ: {result.results}"
