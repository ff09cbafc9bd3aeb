"""Ranks of one host: killed, stopped, asked to end and started again by their agent, and no bit is different."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.elasticity.training import encode, train
from tests.launch.agents.agent_groups import LIMIT, TRAINING, AgentGroup, eventually

pytestmark = [pytest.mark.process, pytest.mark.timeout(240)]

UNTIL = 150
FEW = 20


@pytest.fixture
def group(tmp_path: Path) -> Iterator[AgentGroup]:
    made = AgentGroup(tmp_path)
    yield made
    made.close()


def wanted(until: int) -> str:
    return encode(asyncio.run(train(None, until=until, pause=0.0)))


def is_drained(group: AgentGroup, pid: int) -> bool:
    """Has a rank ended because it was asked to leave?"""
    path = group.folder / f"result-{pid}"
    text = path.read_text() if path.exists() else ""
    return bool(text) and json.loads(text)[-1] is True


@pytest.mark.soak
def test_ranks_that_are_killed_stopped_and_drained_come_again_and_no_bit_is_different(group: AgentGroup) -> None:
    options = ("--nproc-per-node", "4", "--max-restarts", "1", "--silent-after", "2")
    launcher = group.launch_alone(group.script(TRAINING), str(UNTIL), options=options)
    eventually(lambda: group.trains(4), "training on four ranks")
    killed, stopped, drained, _ = group.pids("one")
    os.kill(killed, signal.SIGKILL)
    os.kill(stopped, signal.SIGSTOP)
    eventually(lambda: not psutil.pid_exists(stopped), "the end of the stopped rank")
    reached = group.step() + 1
    eventually(lambda: group.step() > reached, "training without them")
    os.kill(drained, signal.SIGTERM)
    eventually(lambda: is_drained(group, drained), "the end of the drained rank")
    group.train_on(4, "training on four ranks again")
    assert {killed, stopped, drained}.isdisjoint(group.pids("one"))
    (group.folder / "hurry").touch()
    assert launcher.wait(timeout=LIMIT) == 0, group.output("one")
    output = group.output("one")
    for reason in (
        "rank one/0 was killed by SIGKILL; it starts again",
        "rank one/1 starts again: is stopped",
        "rank one/2 starts again: it was drained",
    ):
        assert reason in output
    assert {result for result in group.results() if not json.loads(result)[-1]} == {wanted(UNTIL)}


@pytest.mark.soak
def test_of_two_ranks_that_get_sigterm_one_leaves_and_the_other_ends_at_once(group: AgentGroup) -> None:
    options = ("--nproc-per-node", "2", "--max-restarts", "0")
    launcher = group.launch_alone(group.script(TRAINING), str(UNTIL), options=options)
    eventually(lambda: group.trains(2), "training on two ranks")
    pids = group.pids("one")
    for pid in pids:
        os.kill(pid, signal.SIGTERM)
    assert launcher.wait(timeout=LIMIT) != 0
    output = group.output("one")
    assert sorted(is_drained(group, pid) for pid in pids) == [False, True]
    assert output.count("starts again: it was drained") == 1
    assert f"exited with code {128 + signal.SIGTERM}" in output
    assert "all members are lost, and with them at least" in output, "the state is gone, which nobody was done with"


@pytest.mark.soak
def test_the_only_rank_ends_at_once_when_it_gets_sigterm(group: AgentGroup) -> None:
    options = ("--nproc-per-node", "1", "--max-restarts", "0")
    launcher = group.launch_alone(group.script(TRAINING), str(UNTIL), options=options)
    eventually(lambda: group.trains(1), "training on one rank")
    [pid] = group.pids("one")
    os.kill(pid, signal.SIGTERM)
    assert launcher.wait(timeout=LIMIT) == 128 + signal.SIGTERM, group.output("one")
    assert group.results() == set()


WAITING = """
import json, os, runpy, signal, socket, sys, time

what, until, rank = *sys.argv[1:], os.environ["LOCAL_RANK"]


def stop_first():
    "Wait for what is named, and be stopped while it does not come."
    pipe = socket.socket(fileno=int(os.environ["ASYNCPAR_ELASTIC_FD"])).makefile("rw")

    def send(**message):
        print(json.dumps(message), file=pipe, flush=True)

    def receive(kind):
        return next(message for message in map(json.loads, pipe) if message["kind"] == kind)

    send(kind="donors")
    if what != "a place":
        receive("donors")
        send(kind="join", lineage=[0, ""], address="nowhere")
    if what == "the next world":
        world = receive("world")
        send(kind="report", generation=world["generation"], lineage=[0, ""], prepared=None, suspects=[])
    os.kill(os.getpid(), signal.SIGSTOP)


def is_first():
    try:
        os.close(os.open(f"first-{rank}", os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        open(f"again-{rank}", "w").close()
        return False
    return True


if what == "its first world" and rank == "1":  # with which there would be one
    while not os.path.exists("again-0"):
        time.sleep(0.02)
elif is_first():
    stop_first()
sys.argv = ["training.py", until]
runpy.run_path("training.py", run_name="__main__")
"""
"""The first process of a slot is stopped while it waits for what is named; the second one trains."""


@pytest.mark.soak
@pytest.mark.parametrize(
    ("what", "options"),
    [
        ("a place", ("--nproc-per-node", "1", "--spares", "1")),
        ("its first world", ("--nproc-per-node", "2")),
        ("the next world", ("--nproc-per-node", "2", "--silent-after", "5", "--on-total-loss", "restart")),
    ],
)
def test_a_rank_that_is_stopped_while_it_waits_is_ended_and_starts_again(
    group: AgentGroup, what: str, options: tuple[str, ...]
) -> None:
    os.replace(group.script(TRAINING), group.folder / "training.py")
    (group.folder / "hurry").touch()
    launcher = group.launch_alone(group.script(WAITING), what, str(FEW), options=(*options, "--max-restarts", "0"))
    assert launcher.wait(timeout=LIMIT) == 0, group.output("one")
    assert "rank one/0 starts again: is stopped" in group.output("one")
    assert wanted(FEW) in group.results()
