"""Groups of real agents: killed, stopped, drained, replaced, and no bit of the job is different."""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import textwrap
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest

from asyncpar.core.addresses import split_address
from asyncpar.observe.image import read_image
from tests.elasticity.training import encode, train
from tests.launch.agents.agent_groups import PLAIN, TRAINING, AgentGroup, eventually
from tests.launch.agents.conftest import Run
from tests.soak import chosen

pytestmark = [pytest.mark.process, pytest.mark.timeout(180)]

UNTIL = 150
LONG = 300


@contextmanager
def open_directory(path: Path) -> Iterator[None]:
    """Hold the lock of a state directory, as an agent does."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


@pytest.fixture
def group(tmp_path: Path) -> Iterator[AgentGroup]:
    made = AgentGroup(tmp_path)
    yield made
    made.close()


def test_a_job_outlives_its_leader_and_a_host_that_drains(group: AgentGroup, run: Run) -> None:
    wanted = encode(asyncio.run(train(None, until=UNTIL, pause=0.0)))
    group.start_all("one", "two", "three")
    options = ("--nnodes", "1:3", "--elastic", "ranks", "--max-restarts", "2", "--last-call", "30")
    launcher = group.launch(TRAINING, str(UNTIL), options=options)
    eventually(lambda: group.trains(3), "training on three hosts")

    leader = group.leader()
    ranks = group.pids(leader)
    group.agents[leader].kill()
    group.agents[leader].wait()
    eventually(lambda: not any(psutil.pid_exists(pid) for pid in ranks), "the end of the ranks of the killed agent")
    eventually(lambda: group.trains(2), "training without the leader's host")

    drained = group.leader()
    [stays] = {"one", "two", "three"} - {leader, drained}
    words = ("drain", drained, "--agent", group.addresses[stays], "--secret-file", str(group.secret), "--grace", "20")
    done = run(*words)
    assert done.returncode == 0, done.stderr
    assert group.agents[drained].wait(timeout=30) == 0
    eventually(lambda: group.trains(1), "training without the drained host")

    (group.folder / "hurry").touch()
    assert launcher.wait(timeout=60) == 0, group.output("launch")
    assert {json.dumps(json.loads(result)[:-1]) for result in group.results() if not json.loads(result)[-1]} == {
        json.dumps(json.loads(wanted)[:-1])
    }
    assert "restart 1" not in "".join(group.output(name) for name in group.agents)


@pytest.mark.soak
def test_a_job_outlives_its_leader_and_hosts_that_stop_come_and_drain(group: AgentGroup) -> None:
    wanted = encode(asyncio.run(train(None, until=UNTIL, pause=0.0)))
    group.start_all("one", "two", "three", "four")
    options = ("--nnodes", "2:4", "--elastic", "ranks", "--max-restarts", "2", "--last-call", "30")
    launcher = group.launch(TRAINING, str(UNTIL), options=options)
    eventually(lambda: group.trains(4), "training on four hosts")

    leader = group.leader()
    ranks = group.pids(leader)
    group.agents[leader].kill()
    group.agents[leader].wait()
    eventually(lambda: not any(psutil.pid_exists(pid) for pid in ranks), "the end of the ranks of the killed agent")
    eventually(lambda: group.trains(3), "training without the leader's host")
    assert group.leader() != leader

    group.start(leader)  # a replacement of the same name
    group.train_on(4, "training with the replacement")

    stopped = next(name for name in ("one", "two", "three", "four") if name not in (leader, group.leader()))
    group.agents[stopped].send_signal(signal.SIGSTOP)
    group.train_on(3, "training without the stopped host")
    group.agents[stopped].send_signal(signal.SIGCONT)
    group.train_on(4, "training with it again")
    assert "the others have gone on without this host" in group.output(stopped)

    drained = group.leader()
    draining = group.command(
        "drain", drained, "--agent", group.addresses[stopped], "--secret-file", str(group.secret), "--grace", "20"
    )
    assert draining.wait(timeout=40) == 0
    assert group.agents[drained].wait(timeout=60) == 0
    eventually(lambda: group.trains(3), "training without the drained host")

    (group.folder / "hurry").touch()
    assert launcher.wait(timeout=60) == 0, group.output("launch")
    assert {json.dumps(json.loads(result)[:-1]) for result in group.results() if not json.loads(result)[-1]} == {
        json.dumps(json.loads(wanted)[:-1])
    }
    assert "restart 1" not in "".join(group.output(name) for name in group.agents)


@pytest.mark.soak
def test_a_rank_that_gets_sigterm_leaves_at_the_end_of_its_step_and_starts_again(group: AgentGroup) -> None:
    wanted = encode(asyncio.run(train(None, until=UNTIL, pause=0.0)))
    group.start_all("one", "two")
    options = ("--nnodes", "1:2", "--elastic", "ranks", "--max-restarts", "0", "--last-call", "30")
    launcher = group.launch(TRAINING, str(UNTIL), options=options)
    eventually(lambda: group.trains(2), "training on two hosts")
    (pid,) = group.pids("two")
    os.kill(pid, signal.SIGTERM)
    result = group.folder / f"result-{pid}"
    eventually(lambda: result.exists() and bool(result.read_text()), "the end of the rank")
    assert json.loads(result.read_text())[-1] is True, "it was drained"
    group.train_on(2, "training with the rank that has started again")
    assert "two/0 starts again: it was drained" in group.output("two")
    (group.folder / "hurry").touch()
    assert launcher.wait(timeout=60) == 0, group.output("launch")
    assert {json.dumps(json.loads(result)[:-1]) for result in group.results() if not json.loads(result)[-1]} == {
        json.dumps(json.loads(wanted)[:-1])
    }


@pytest.mark.soak
def test_agents_outlive_a_job_that_starts_again_with_every_world_and_take_the_next_one(group: AgentGroup) -> None:
    group.start_all("one", "two", "three")
    options = ("--nnodes", "1:3", "--nproc-per-node", "2", "--last-call", "30")
    launcher = group.launch(PLAIN, options=options)
    worlds = group.folder

    def has_world(size: int) -> bool:
        found = [path.name.split("-") for path in worlds.glob("world-*")]
        ranks: dict[str, set[str]] = {}
        for _, generation, rank, of in found:  # a rank that was just starting may write its own after its job is over
            if of == str(size):
                ranks.setdefault(generation, set()).add(rank)
        return any(there == set(map(str, range(size))) for there in ranks.values())

    eventually(lambda: has_world(6), "a world of six")
    victim = group.leader()
    group.agents[victim].kill()
    group.agents[victim].wait()
    eventually(lambda: has_world(4), "a world of four")
    (group.folder / "end").touch()
    assert launcher.wait(timeout=40) == 0, group.output("launch")
    (group.folder / "end").unlink()
    for path in worlds.glob("world-*"):
        path.unlink()

    crash = "import os, signal, sys; sys.exit(3) if os.environ['RANK'] == '1' else signal.pause()"
    failing = group.launch(crash, options=("--nnodes", "1:2", "--max-restarts", "1", "--last-call", "0.5"))
    assert failing.wait(timeout=40) == 3, group.output("launch")
    running = [name for name in group.agents if name != victim]
    assert all("exited with code 3" in group.output(name) for name in running)

    interrupted = group.launch(PLAIN, options=("--nnodes", "1:2", "--last-call", "30"))
    eventually(lambda: has_world(2), "a world of two")
    pids = [pid for name in running for pid in group.pids(name)]
    second = group.launch(PLAIN, options=("--nnodes", "1:2"))
    assert second.wait(timeout=60) == 2
    assert "the agents run job 3" in group.output("launch")
    interrupted.send_signal(signal.SIGINT)
    assert interrupted.wait(timeout=60) == 130
    eventually(lambda: not any(psutil.pid_exists(pid) for pid in pids), "the end of the ranks")
    for name in running:
        group.agents[name].send_signal(signal.SIGINT)
    assert [group.agents[name].wait(timeout=60) for name in running] == [0, 0]


@pytest.mark.soak
def test_launchers_without_agents_are_agents_and_the_first_may_go(group: AgentGroup) -> None:
    wanted = encode(asyncio.run(train(None, until=UNTIL, pause=0.0)))
    endpoint = f"127.0.0.1:{group.free_port()}"
    path = group.script(TRAINING)
    common = ("launch", "--nnodes", "2:3", "--elastic", "ranks", "--rdzv-endpoint", endpoint, "--last-call", "30")
    launchers = {}
    for name in ("one", "two", "three"):
        arguments = (*common, "--secret-file", str(group.secret), "--host-name", name, path, str(UNTIL))
        launchers[name] = group.command(*arguments, log=f"{name}.log")
        if name == "one":
            eventually(lambda: "serves at" in group.output("one"), "the first launcher")
    eventually(lambda: len(list(group.folder.glob("step-*"))) == 3 and group.step() > 3, "training")
    launchers["one"].kill()
    reached = group.step()
    eventually(lambda: group.step() > reached + 5, "training without the first launcher")
    (group.folder / "hurry").touch()
    assert [launchers[name].wait(timeout=60) for name in ("two", "three")] == [0, 0], group.output("two")
    assert group.results() == {wanted}


def is_served(address: str) -> bool:
    """Decide whether a server accepts connections at ``address``."""
    with socket.socket() as probe:
        return probe.connect_ex(split_address(address)) == 0


LATE = """
    from asyncpar.__main__ import main
    from asyncpar.launch.agents import submission
    from asyncpar.launch.agents.control_client import NoAgent

    find_group = submission.find_group

    async def find_later(client, *, patience):
        submission.find_group = find_group
        raise NoAgent("not yet")

    submission.find_group = find_later
    main()
"""
"""The command, for which the other launcher founds the group just after it has looked for one."""


def test_of_two_launchers_at_once_the_slower_one_takes_part_with_its_own_number_of_ranks(group: AgentGroup) -> None:
    endpoint = f"127.0.0.1:{group.free_port()}"
    proof = ("--secret-file", str(group.secret))
    common = ("launch", "--nnodes", "1:2", "--last-call", "30", "--rdzv-endpoint", endpoint, *proof)
    path = group.script(PLAIN)
    first = group.command(*common, "--nproc-per-node", "1", path, log="first.log")
    eventually(lambda: is_served(endpoint), "the first launcher")
    late = ("-c", textwrap.dedent(LATE))
    second = group.command(*common, "--nproc-per-node", "2", path, log="second.log", program=late)
    worlds = {f"world-0-{rank}-3" for rank in range(3)}
    eventually(lambda: {path.name for path in group.folder.glob("world-*")} == worlds, "a world of three ranks")
    (group.folder / "end").touch()
    assert [process.wait(timeout=60) for process in (first, second)] == [0, 0], group.output("second")


SUMMING = """
    import os
    import numpy as np
    import asyncpar as ap

    async def main():
        async with ap.init() as node:
            ones = np.ones(3)
            await node.world.all_reduce(ones)
            open(f"sum-{os.environ['RANK']}", "w").write(str(ones[0]))

    ap.run(main())
"""


@pytest.mark.soak
def test_jobs_of_any_name_start_again_with_every_world(group: AgentGroup) -> None:
    group.start_all("one", "two")
    for name in ((), ("--rdzv-id", "nightly")):
        options = ("--nnodes", "2:2", "--nproc-per-node", "2", *name)
        launcher = group.launch(SUMMING, options=options)
        assert launcher.wait(timeout=40) == 0, group.output("launch") + group.output("one")
        assert [(group.folder / f"sum-{rank}").read_text() for rank in range(4)] == ["4.0"] * 4
        for rank in range(4):
            (group.folder / f"sum-{rank}").unlink()


FAILING = """
    import os
    import asyncpar as ap
    from tests.elasticity.training import train

    try:
        os.close(os.open("slow", os.O_CREAT | os.O_EXCL))
        pause = 0.1
    except FileExistsError:
        pause = 0.0

    def on_step(place, step):
        if place == "computed" and step.number == 3:
            raise ValueError("bad batch")

    ap.run(train(None, until=9, on_step=on_step, pause=pause))
"""


@pytest.mark.soak
@pytest.mark.parametrize("hosts", ["1:2", "2:2"])
def test_a_step_that_fails_on_every_host_ends_the_job_and_is_named(group: AgentGroup, hosts: str) -> None:
    group.start_all("one", "two")
    options = ("--nnodes", hosts, "--elastic", "ranks", "--max-restarts", "50", "--last-call", "30")
    launcher = group.launch(FAILING, options=options)
    assert launcher.wait(timeout=60) == 1, group.output("launch")
    assert "step 3: it failed in every place; the fault is in the program" in group.output("launch")
    assert "ValueError: bad batch" in group.output("launch")


@pytest.mark.soak
def test_a_crash_is_healed_where_all_hosts_are_needed(group: AgentGroup) -> None:
    wanted = encode(asyncio.run(train(None, until=UNTIL, pause=0.0)))
    group.start_all("one", "two")
    options = ("--nnodes", "2:2", "--elastic", "ranks", "--max-restarts", "10")
    launcher = group.launch(TRAINING, str(UNTIL), options=options)
    for name in ("one", "two"):
        group.train_on(2, "training on both hosts")
        os.kill(group.pids(name)[0], signal.SIGKILL)
    group.train_on(2, "training on both hosts again")
    (group.folder / "hurry").touch()
    assert launcher.wait(timeout=60) == 0, group.output("launch")
    assert {json.dumps(json.loads(result)[:-1]) for result in group.results()} == {json.dumps(json.loads(wanted)[:-1])}


def states(group: AgentGroup) -> dict[str, str]:
    view = group.view()
    return {} if view is None else {host.name: host.state for host in view.hosts}


@pytest.mark.soak
def test_a_host_beyond_the_most_waits_and_takes_the_place_of_one_that_is_killed(group: AgentGroup) -> None:
    wanted = encode(asyncio.run(train(None, until=LONG, pause=0.0)))
    group.start_all("one", "two")
    options = ("--nnodes", "1:2", "--elastic", "ranks", "--last-call", "30")
    launcher = group.launch(TRAINING, str(LONG), options=options)
    eventually(lambda: group.trains(2), "training on two hosts")
    group.start("three")
    eventually(lambda: states(group).get("three") == "waiting", "a host that waits")
    eventually(lambda: len(group.pids("three")) == 1, "its rank")
    [waiting] = group.pids("three")
    eventually(lambda: "waits: the job has all its 2 hosts" in group.output("three"), "its reason")
    reached = group.step() + 10
    eventually(lambda: group.trains(2, beyond=reached), "training on two hosts as before")
    view = group.view()
    assert view is not None
    assert (view.generation, view.world_hosts) == (0, 2), "the others have not noticed"
    assert group.pids("three") == [waiting], "it was not started again"

    lost = group.leader()
    group.agents[lost].kill()
    group.agents[lost].wait()
    reached = group.step() + 1
    eventually(
        lambda: group.trains(2, beyond=reached), f"training with the host that has waited: {group.output('three')}"
    )
    assert group.pids("three") == [waiting]
    group.start(lost)
    eventually(lambda: states(group).get(lost) == "waiting", "the host that comes again")
    (group.folder / "hurry").touch()
    assert launcher.wait(timeout=60) == 0, group.output("launch") + group.output(lost)
    assert {json.dumps(json.loads(result)[:-1]) for result in group.results() if not json.loads(result)[-1]} == {
        json.dumps(json.loads(wanted)[:-1])
    }
    worlds = re.findall(r"(\d+) ranks? on", "".join(group.output(name) for name in group.agents))
    assert worlds
    assert max(map(int, worlds)) == 2


@pytest.mark.soak
def test_a_host_beyond_the_most_waits_also_where_ranks_start_again_with_every_world(group: AgentGroup) -> None:
    group.start_all("one", "two", "three")
    launcher = group.launch(PLAIN, options=("--nnodes", "1:2", "--last-call", "30"))

    def waiting() -> list[str]:
        return [name for name, state in states(group).items() if state == "waiting"]

    eventually(lambda: len(list(group.folder.glob("world-0-*-2"))) == 2, "a world of two hosts")
    eventually(lambda: len(waiting()) == 1, "a host that waits")
    [spare] = waiting()
    lost = next(name for name in group.agents if name != spare)
    group.agents[lost].kill()
    group.agents[lost].wait()
    eventually(lambda: len(list(group.folder.glob("world-1-*-2"))) == 2, "a world with the host that has waited")
    group.start(lost)
    eventually(lambda: waiting() == [lost], "the host that comes again")
    eventually(lambda: "waits: the job has all its 2 hosts" in group.output(lost), "its reason")
    (group.folder / "end").touch()
    assert launcher.wait(timeout=40) == 0, group.output("launch")
    assert {path.name.rsplit("-", 1)[1] for path in group.folder.glob("world-*")} == {"2"}


@pytest.mark.soak
def test_spares_that_have_waited_for_long_step_in_for_ranks_that_are_killed_or_stopped(group: AgentGroup) -> None:
    wanted = encode(asyncio.run(train(None, until=UNTIL, pause=0.0)))
    group.start_all("one", "two")
    options = ("--nnodes", "2:2", "--elastic", "ranks", "--spares", "1", "--silent-after", "2")

    def pids(name: str, *, are_spares: bool) -> list[int]:
        host = group.host(name)
        found = () if host is None else host.ranks
        found = tuple(rank for rank in found if (rank.is_spare if are_spares else rank.rank is not None))
        return [rank.pid for rank in found if rank.pid is not None]

    launcher = group.launch(TRAINING, str(UNTIL), options=options)
    eventually(lambda: group.trains(2), "training on both hosts")
    eventually(lambda: all(pids(name, are_spares=True) for name in ("one", "two")), "a spare on each host")
    begin = time.monotonic()
    eventually(lambda: time.monotonic() - begin > 6.0, "thrice the time after which a silent rank is ended")
    for name, fault in (("one", signal.SIGKILL), ("two", signal.SIGSTOP)):
        spares = pids(name, are_spares=True)
        for pid in pids(name, are_spares=False):
            os.kill(pid, fault)
        eventually(lambda name=name, spares=spares: pids(name, are_spares=False) == spares, "the spare's place")  # type: ignore[misc]
        group.train_on(2, "training on both hosts again")
    (group.folder / "hurry").touch()
    assert launcher.wait(timeout=60) == 0, group.output("launch")
    assert {result for result in group.results() if not json.loads(result)[-1]} == {wanted}
    assert "after the job was complete" not in group.output("one") + group.output("two"), "spares end well"


BUSY = TRAINING.replace(
    "os.replace(",
    """if os.path.exists(f"busy-{os.getpid()}"):
                os.unlink(f"busy-{os.getpid()}")
                time.sleep(12)
            os.replace(""",
)


@pytest.mark.soak
def test_a_rank_that_is_busy_when_a_world_ends_is_waited_for(group: AgentGroup) -> None:
    group.start_all("one", "two", "three")
    options = ("--nnodes", "3:3", "--elastic", "ranks", "--max-restarts", "9")
    launcher = group.launch(BUSY, str(UNTIL), options=options)
    eventually(lambda: group.trains(3), "training on all hosts")
    (busy,), (victim,) = group.pids("two"), group.pids("three")
    mark = group.folder / f"busy-{busy}"
    mark.touch()
    eventually(lambda: not mark.exists(), "a busy rank")
    os.kill(victim, signal.SIGKILL)
    group.train_on(3, "training on all hosts again")
    assert busy in group.pids("two")
    (group.folder / "hurry").touch()
    assert launcher.wait(timeout=60) == 0, group.output("launch")


@pytest.mark.soak
def test_of_two_hosts_and_a_witness_either_host_may_go(group: AgentGroup) -> None:
    wanted = encode(asyncio.run(train(None, until=UNTIL, pause=0.0)))
    group.start("one")
    eventually(lambda: group.host("one") is not None, "the first agent")
    group.start("two")
    group.start("witness", "--witness")
    eventually(lambda: all(group.host(name) is not None for name in ("two", "witness")), "the group")
    options = ("--nnodes", "1:2", "--elastic", "ranks", "--max-restarts", "2", "--last-call", "30")
    launcher = group.launch(TRAINING, str(UNTIL), options=options)
    eventually(lambda: group.trains(2), "training on two hosts")
    witness = group.host("witness")
    assert witness is not None
    assert (witness.state, witness.is_voter, witness.ranks) == ("witness", True, ())
    lost = group.leader() if group.leader() != "witness" else "one"
    group.agents[lost].kill()
    group.agents[lost].wait()
    group.train_on(1, f"training without {lost}")
    (group.folder / "hurry").touch()
    assert launcher.wait(timeout=60) == 0, group.output("launch")
    assert {json.dumps(json.loads(result)[:-1]) for result in group.results()} == {json.dumps(json.loads(wanted)[:-1])}
    assert "no quorum" not in group.output("one") + group.output("two")


def voters(group: AgentGroup) -> set[str]:
    view = group.view()
    return set() if view is None else {host.name for host in view.hosts if host.is_voter}


@pytest.mark.soak
def test_of_four_hosts_three_are_killed_in_turn_and_the_first_voter_goes_on_alone(group: AgentGroup) -> None:
    wanted = encode(asyncio.run(train(None, until=UNTIL, pause=0.0)))
    names = ["one", "two", "three", "four"]
    group.start_all(*names)
    options = ("--nnodes", "1:4", "--elastic", "ranks", "--last-call", "30")
    launcher = group.launch(TRAINING, str(UNTIL), options=options)
    eventually(lambda: group.trains(4) and voters(group) == set(names), "training on four hosts, which all vote")
    while len(names) > 1:
        leader = group.leader()
        victim = (
            leader if len(names) > 2 else next(name for name in names if name != leader)
        )  # of two the first goes on
        names.remove(victim)
        group.agents[victim].kill()
        group.agents[victim].wait()
        reached = group.step() + 1
        eventually(lambda reached=reached: group.trains(len(names), beyond=reached), f"training without {victim}")  # type: ignore[misc]
        eventually(lambda: voters(group) == set(names), f"a quorum of {names}")
    (group.folder / "hurry").touch()
    assert launcher.wait(timeout=60) == 0, group.output("launch")
    assert {json.dumps(json.loads(result)[:-1]) for result in group.results()} == {json.dumps(json.loads(wanted)[:-1])}


@contextmanager
def small_disk(path: Path) -> Iterator[Callable[[], None]]:
    """Have a file system of 64 kB at ``path``; the result fills it."""
    path.mkdir()
    mount = shutil.which("mount")
    if os.geteuid() != 0 or mount is None:
        pytest.skip("a small file system needs root and mount")
    made = subprocess.run([mount, "-t", "tmpfs", "-o", "size=64k", "tmpfs", path], capture_output=True, check=False)
    if made.returncode != 0:
        pytest.skip(f"no file system can be mounted here: {made.stderr.decode().strip()}")

    def fill() -> None:
        with suppress(OSError), open(path / "other", "wb", buffering=0) as file:
            while True:
                file.write(bytes(1024))

    try:
        yield fill
    finally:
        subprocess.run(["umount", "--lazy", path], check=True)


def test_an_agent_whose_disk_is_full_ends_with_one_line(group: AgentGroup) -> None:
    with small_disk(group.folder / "disk") as fill:
        fill()
        agent = group.start("one", "--state-dir", str(group.folder / "disk"))
        assert agent.wait(timeout=60) == 1
    assert "votes: the votes cannot be stored: No space left on device" in group.output("one")
    assert "Traceback" not in group.output("one")


@pytest.mark.soak
def test_a_full_disk_and_a_rotated_secret_end_what_has_them_and_the_others_go_on(group: AgentGroup) -> None:
    own = group.folder / "own-secret"
    shutil.copy(group.secret, own)
    disk = group.folder / "disk"
    with small_disk(disk) as fill:
        group.start_all("one")
        group.start("two", secret=own)
        group.start("three", "--state-dir", str(disk))
        eventually(lambda: all(group.host(name) is not None for name in ("two", "three")), "the group")
        options = ("--nnodes", "1:3", "--elastic", "ranks", "--max-restarts", "1", "--last-call", "30")
        launcher = group.launch(TRAINING, str(UNTIL), options=options)
        eventually(lambda: group.trains(3), "training on three hosts")
        fill()
        own.write_bytes(os.urandom(32))
        os.kill(group.pids("two")[0], signal.SIGKILL)  # which changes the world: all vote
        assert group.agents["three"].wait(timeout=30) == 1
        assert re.search(
            r"votes: the votes cannot be stored: No space left on device; this host", group.output("three")
        )
        eventually(
            lambda: "rank two/0 exited with code 1" in group.output("two"), "the end of the rank with another secret"
        )
        assert "AuthenticationError: healing: one/0/" in group.output("two")
        assert "did not accept our secret" in group.output("two")
        group.train_on(1, "training on one host")
        again = group.command(
            "agent", "--name", "three", "--state-dir", str(disk), "--join", group.addresses["one"],
            "--secret-file", str(group.secret), log="again.log",
        )  # fmt: skip
        assert again.wait(timeout=60) == 1
        assert "votes: the votes cannot be stored: No space left on device" in group.output("again")
        assert "Traceback" not in group.output("three") + group.output("again")
        launcher.send_signal(signal.SIGINT)
        assert launcher.wait(timeout=30) == 130, group.output("launch")


OTHERS = """
    import asyncio, os, sys, time
    import asyncpar as ap
    from tests.elasticity import training

    try:
        os.close(os.open(f"first-{sys.argv[1]}", os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        training.PORTIONS = int(sys.argv[1])

    def on_step(place, step):
        if place == "computed" and not step.is_replay and step.number > 20:
            time.sleep(0.15)
        open("step", "w").write(str(step.number))

    ap.run(training.train(None, until=10_000, on_step=on_step, pause=0.0))
"""


@pytest.mark.soak
def test_a_joining_rank_with_other_settings_or_another_program_learns_what_differs(group: AgentGroup) -> None:
    """The same program reads a setting from outside, or is changed, after the job has begun; the others go on."""
    group.start_all("one")
    options = ("--nnodes", "1:3", "--elastic", "ranks", "--max-restarts", "0", "--last-call", "0")
    launcher = group.launch(OTHERS, "16", options=options)
    step = group.folder / "step"
    eventually(lambda: step.exists() and int(step.read_text() or 0) > 20, "training")
    group.start("two")
    eventually(
        lambda: "rank two/0 exited with code 1" in group.output("two"), "the end of the rank with other settings"
    )
    assert "UsageError: portions: it is 16 here and 8 on the ranks that train" in group.output("two")
    program = group.folder / "job.py"
    program.write_text(program.read_text().replace("training.PORTIONS = ", "") + "# another one\n")
    group.start("three")
    eventually(lambda: "rank three/0 exited with code 1" in group.output("three"), "the end of the other program")
    assert re.search(
        r"UsageError: program: it is job.py, digest \w+ here and job.py, digest \w+ on the ranks", group.output("three")
    )
    view = group.view()
    assert view is not None
    assert (view.world_size, view.generation) == (1, 0), "the group has not noticed"
    reached = int(step.read_text() or 0)
    eventually(lambda: int(step.read_text() or 0) > reached + 3, "training as before")
    launcher.send_signal(signal.SIGINT)
    assert launcher.wait(timeout=30) == 130, group.output("launch")


HURRIED = """
    from asyncpar.__main__ import main
    from asyncpar.hosts import entry

    entry._ENTER_SECONDS = 0.5
    main()
"""
"""The command, which gives an agent that it joins less time to answer than users' commands do."""


def test_what_cannot_be_is_reported_in_one_line(group: AgentGroup, run: Run) -> None:
    group.start_all("one")
    secret = ("--secret-file", str(group.secret))
    (group.folder / "other").write_bytes(os.urandom(32))
    (group.folder / "other").chmod(0o600)
    hurried = ("-c", textwrap.dedent(HURRIED))
    joins = ("--join", group.addresses["one"], *secret)
    twice = group.command("agent", "--name", "one", *joins, log="twice.log", program=hurried)
    rotated = group.start("two", secret=group.folder / "other")
    nobody = group.command("agent", "--join", "127.0.0.1:1", *secret, log="nobody.log", program=hurried)
    kept, damaged = (group.folder / name for name in ("kept", "damaged"))
    kept.mkdir()
    damaged.mkdir()
    (damaged / "votes").write_bytes(b"asyncpar votes 1\nxxxxtorn")
    with open_directory(kept):
        shared = run("agent", "--name", "three", "--state-dir", str(kept), *joins)
    torn = run("agent", "--name", "three", "--state-dir", str(damaged), *joins)
    unknown = run("drain", "three", "--agent", group.addresses["one"], *secret)
    absent = run("status", "--agent", "127.0.0.1:1", *secret)
    assert [process.wait(timeout=30) for process in (twice, rotated, nobody)] == [2, 1, 1]
    assert [done.returncode for done in (shared, torn, unknown, absent)] == [2, 1, 2, 1]
    assert "kept is in use by another agent" in shared.stderr
    assert "the votes are damaged" in torn.stderr
    assert "--name: a host called 'one' is in the group already" in group.output("twice")
    assert "did not accept our secret" in group.output("two")
    assert "--join: no agent answers at 127.0.0.1:1" in group.output("nobody")
    assert "HOST: expected one of one, got 'three'" in unknown.stderr
    assert "no agent answers at 127.0.0.1:1" in absent.stderr
    for done in (shared, torn, unknown, absent):
        assert "Traceback" not in done.stdout + done.stderr
    for log in ("twice", "two", "nobody"):
        assert "Traceback" not in group.output(log)


def test_an_agent_keeps_what_is_left_of_a_job_that_fails_and_nothing_of_one_that_does_not(group: AgentGroup) -> None:
    remains = group.folder / "remains"
    group.start("one", "--post-mortem", str(remains))
    eventually(lambda: group.host("one") is not None, "the agent")
    options = ("--nnodes", "1:1", "--elastic", "ranks", "--max-restarts", "0")
    assert group.launch("pass", options=options).wait(60) == 0
    assert not remains.exists()
    for number in chosen((2,), soak=(2, 3)):
        assert group.launch("raise ValueError('bad thing')", options=options).wait(60) != 0
        [folder] = [path for path in remains.iterdir() if path.name.startswith(f"job.py.{number}-")]
        eventually((folder / "summary.txt").exists, "the summary")
        text = (folder / "summary.txt").read_text()
        assert "rank 0: exited with code 1: ValueError: bad thing" in text
        assert (folder / "logs" / "0-0.stderr").read_text().endswith("ValueError: bad thing\n")
    refused = group.launch("pass", options=(*options, "--post-mortem", str(remains)))
    assert refused.wait(60) == 2
    assert (
        "--post-mortem: agents run this job; give it to each `asyncpar agent`"
        in (group.folder / "launch.log").read_text()
    )


AT_WORK = """
    import numpy as np
    import asyncpar as ap

    async def main():
        async with ap.init() as node:
            x = np.ones(1024, np.float32)
            await node.world.all_reduce(x)
            open(f"there-{node.rank}", "w").close()
            while True:
                await node.world.all_reduce(x)

    ap.run(main)
"""


def test_an_agent_that_is_killed_leaves_what_its_ranks_did(group: AgentGroup) -> None:
    remains = group.folder / "remains"
    agent = group.start("one", "--post-mortem", str(remains))
    eventually(lambda: group.host("one") is not None, "the agent")
    group.launch(AT_WORK, options=("--nnodes", "1:1", "--nproc-per-node", "2"))
    eventually(lambda: len(list(group.folder.glob("there-*"))) == 2, "the job")
    agent.kill()
    eventually(lambda: bool(list(remains.glob("*/summary.txt"))), "the summary")
    [summary] = remains.glob("*/summary.txt")
    assert "The agent on one (pid " in summary.read_text()
    rings = {ring.name: read_image(ring.read_bytes()) for ring in (summary.parent / "rings").iterdir()}
    assert len(rings) == 2
    for image in rings.values():
        assert image.operations[-1].name == "all_reduce"
        assert image.operations[-1].site is not None
        assert image.operations[-1].site.file.endswith("job.py")
