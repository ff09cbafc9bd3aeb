"""Ranks of a launched job hear by name of one that is killed, stopped or hung: in every phase.

``--soak`` runs every point of formation with every victim.
"""

from __future__ import annotations

import json
import signal
import textwrap
from typing import Any

import pytest

from tests.launch.ways import changing_first, fixed_first
from tests.soak import chosen, first

pytestmark = [pytest.mark.process, pytest.mark.timeout(120)]
Launcher = Any  # the class lives in conftest.py

HEAD = """
    import asyncio, ctypes, importlib, threading
    import numpy as np
    import asyncpar as ap

    victim, point, number = int(sys.argv[1]), sys.argv[2], int(sys.argv[3])

    def say(**record):
        print(json.dumps({"rank": rank, **record}), flush=True)

    def end_here():
        if rank == victim:
            os.kill(os.getpid(), number)

    def end_at(module, name, when):
        inner = getattr(importlib.import_module(module), name)
        async def wrapped(*args, **kwargs):
            if when == "before":
                end_here()
            result = await inner(*args, **kwargs)
            if when == "after":
                end_here()
            return result
        setattr(importlib.import_module(module), name, wrapped)

    class Sleeper(ap.Actor):
        @ap.endpoint
        async def nap(self) -> None:
            end_here()

    async def main():
        try:
            async with ap.init() as node:
                await body(node)
        except BaseException as error:
            say(kind=type(error).__name__, blamed=getattr(error, "rank", None), text=str(error))
            raise
"""
STEPS = """
    async def body(node):
        x = np.ones(1000, np.float32)
        for step in range(10**9):
            await node.world.all_reduce(x, op="max")
            if step == 20:
                end_here()

    ap.run(main)
"""


HURRIED = """
    import sys
    from asyncpar.__main__ import main
    from asyncpar.launch import vitals

    vitals.HUNG_SECONDS = 2.5  # a rank sends a heartbeat every second
    main()
"""
"""The launcher, which waits less long for a sign of life than users' launchers do."""


def launch(
    launcher: Launcher,
    body: str,
    *arguments: object,
    options: tuple[str, ...] = (),
    is_hurried: bool = False,
    ranks: int = 3,
) -> tuple[Any, list[Any]]:
    """Run a job; return how it ended, and what the ranks said."""
    script = launcher.script(textwrap.dedent(HEAD) + textwrap.dedent(body))
    words = ("--nproc-per-node", str(ranks), *options, script, *map(str, arguments))
    if is_hurried:
        hurried = launcher.directory / "hurried.py"
        hurried.write_text(textwrap.dedent(HURRIED))
        done = launcher.finish(launcher.start(*words, program=(str(hurried),)))
    else:
        done = launcher.run(*words)
    said = [line.split("] ", 1)[-1] for line in (done.stdout + done.stderr).splitlines()]
    records = [json.loads(line) for line in said if line.startswith("{")]
    return done, records


def check_survivors(records: list[Any], victim: int, *, ranks: int = 3) -> None:
    named = {record["rank"]: (record["kind"], record["blamed"]) for record in records}
    assert named == {rank: ("PeerLost", victim) for rank in range(ranks) if rank != victim}, records


@fixed_first
@pytest.mark.parametrize("victim", first(1, range(3)))
def test_every_survivor_of_a_kill_gets_peer_lost_before_it_is_asked_to_end(
    launcher: Launcher, victim: int, hosts: tuple[str, ...]
) -> None:
    ranks = chosen(2, soak=3)
    done, records = launch(launcher, STEPS, victim, "-", int(signal.SIGKILL), options=hosts, ranks=ranks)
    check_survivors(records, victim, ranks=ranks)
    assert done.returncode == 137
    assert f"rank {victim} failed first: was killed by SIGKILL" in done.stderr


@pytest.mark.soak
def test_survivors_that_wait_for_no_message_of_the_killed_rank_get_peer_lost_too(launcher: Launcher) -> None:
    """They sit in an ask to another rank, or wait for a message of it: only the agent tells them in time."""
    body = """
        async def body(node):
            await node.world.barrier()
            if rank == 1:
                end_here()
            await node.world.recv(2 - rank)

        ap.run(main)
    """
    _, records = launch(launcher, body, 1, "-", int(signal.SIGKILL))
    check_survivors(records, 1)


@changing_first
def test_a_stopped_rank_is_reported_at_once_and_is_an_error_of_collectives_and_asks_after_the_limit(
    launcher: Launcher, hosts: tuple[str, ...]
) -> None:
    body = """
        async def body(node):
            if rank == victim:
                await node.spawn(Sleeper, name="s")
            await node.world.barrier()
            if rank == 0:
                await node.ref("s", rank=victim).nap()
            await node.world.barrier()

        ap.run(main)
    """
    options = (*hosts, "--silent-after", "2")
    done, records = launch(launcher, body, 2, "-", int(signal.SIGSTOP), options=options)
    check_survivors(records, 2)
    assert "rank 2 is stopped (SIGSTOP, or a debugger); after 2 s of it (--silent-after) the job ends" in done.stderr
    assert "rank 2 failed first: was stopped for 2." in done.stderr


@pytest.mark.soak
def test_a_stopped_rank_is_an_error_earlier_if_the_user_asks(launcher: Launcher) -> None:
    options = ("--silent-after", "off", "--stopped-after", "2")
    done, records = launch(launcher, STEPS, 1, "-", int(signal.SIGSTOP), options=options)
    check_survivors(records, 1)
    assert "rank 1 is stopped (SIGSTOP, or a debugger); after 2 s of it (--stopped-after) the job ends" in done.stderr
    assert "rank 1 failed first: was stopped for 2." in done.stderr


@fixed_first
def test_a_rank_that_holds_its_interpreter_lock_is_an_error_after_the_limit(
    launcher: Launcher, hosts: tuple[str, ...]
) -> None:
    body = """
        async def body(node):
            await node.world.barrier()
            if rank == victim:
                ctypes.PyDLL(None).sleep(1000)
            await node.world.barrier()

        ap.run(main)
    """
    options = (*hosts, "--silent-after", "3")
    done, records = launch(launcher, body, 1, "-", 0, options=options, is_hurried=True, ranks=2)
    assert [(record["rank"], record["kind"], record["blamed"]) for record in records] == [(0, "PeerLost", 1)], records
    assert "rank 1 runs no Python code (something holds its interpreter lock); after 3 s of it" in done.stderr
    assert "rank 1 failed first: ran no Python code" in done.stderr
    assert "rank 0 runs no Python code" not in done.stderr


@pytest.mark.soak
def test_a_rank_that_computes_is_left_alone_and_one_that_holds_its_interpreter_lock_is_found(
    launcher: Launcher,
) -> None:
    """In this order: both give no sign of life, but only the first uses the processor."""
    body = """
        import re

        def compute(seconds):
            '''Hold the lock in one call until so much processor time is used: the call looks for signals.'''
            def end(*_):
                raise InterruptedError
            signal.signal(signal.SIGPROF, end)
            signal.setitimer(signal.ITIMER_PROF, seconds)
            try:
                re.match("(a|a)*b", "a" * 100)
            except InterruptedError:
                return
            raise AssertionError("it ended by itself")

        async def body(node):
            await node.world.barrier()
            if rank == 0:
                compute(3.5)
            if rank == 1:  # it computes without the loop, but is not silent
                end = time.time() + 3.5
                while time.time() < end:
                    np.linalg.svd(np.ones((20, 20)))
                    time.sleep(0.01)
            await node.world.barrier()
            if rank == victim:
                ctypes.PyDLL(None).sleep(1000)
            await node.world.barrier()

        ap.run(main)
    """
    done, records = launch(launcher, body, 2, "-", 0, options=("--silent-after", "3"), is_hurried=True)
    check_survivors(records, 2)
    how = "a C call holds its interpreter lock, and computes"
    assert f"rank 0 runs no Python code ({how}); the job waits for it (--busy-after SECONDS would end" in done.stderr
    assert "rank 0 runs again" in done.stderr
    assert "rank 1 runs no Python code" not in done.stderr
    assert "rank 2 runs no Python code (something holds its interpreter lock); after 3 s of it" in done.stderr
    assert "rank 2 failed first: ran no Python code" in done.stderr


POINTS = {
    "start of the program": "end_here()",
    "before the server": 'end_at("asyncpar.bootstrap", "serve_links", "before")',
    "before the world": 'end_at("asyncpar.bootstrap", "join_world", "before")',
    "between world and arena": 'end_at("asyncpar.node", "form_arena", "before")',
    "convening": 'end_at("asyncpar.net.arena.rendezvous", "_send_roster", "before")',
    "after the arena": 'end_at("asyncpar.node", "form_arena", "after")',
}
ALL = [
    (point, number, victim)
    for point in POINTS
    for number in (signal.SIGKILL, signal.SIGSTOP)
    for victim in (0, 1)
    if (point, victim) != ("convening", 1)
]
SAMPLE = ("between world and arena", signal.SIGKILL, 0)


@pytest.mark.parametrize(("point", "number", "victim"), chosen([SAMPLE], soak=ALL))
def test_formation_ends_with_the_name_of_the_rank_that_was_killed_or_stopped(
    launcher: Launcher, point: str, number: signal.Signals, victim: int
) -> None:
    body = f"\n{POINTS[point]}\n" + textwrap.dedent(STEPS)
    ranks, options = chosen(2, soak=3), ("--silent-after", "30")
    done, records = launch(launcher, body, victim, point, int(number), options=options, ranks=ranks)
    assert {record["blamed"] for record in records} <= {victim}, records
    assert f"rank {victim} failed first" in done.stderr
    if point != "start of the program":  # where the others may not have come to try stopping it
        assert len(records) == ranks - 1, (records, done.stderr)
