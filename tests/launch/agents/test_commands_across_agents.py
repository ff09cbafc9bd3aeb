"""`trace`, `flight`, `stacks`, `report`, pages and post-mortems of a job whose ranks agents of two hosts run."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import urllib.request
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.launch.agents.agent_groups import AgentGroup, eventually
from tests.launch.agents.agent_pages import SHOWN, hosts_of, see, shows_both, spoken, url_of
from tests.launch.agents.conftest import Run
from tests.launch.test_launch_dashboard import ask
from tests.stopped import stop_process

pytestmark = [pytest.mark.process, pytest.mark.timeout(240)]

PROGRAM = """
    import asyncio, os, sys
    import numpy as np
    import asyncpar as ap

    async def main():
        print("spoken by a rank", flush=True)
        async with ap.init() as node:
            x, other = np.ones(1000, np.float32), 1 - node.rank
            for step in range(40):
                with ap.span("load", step=step):
                    await asyncio.sleep(0.001)
                await node.world.all_reduce(x)
                await asyncio.gather(node.world.send(x, other), node.world.recv(other))
            open(f"there-{node.rank}-{os.getpid()}", "w").close()
            if node.rank == 1:
                print("rank 1 sleeps", flush=True)
                await asyncio.sleep(3600)
            await node.world.barrier()

    asyncio.run(main())
"""
RANKS = 2


@pytest.fixture
def group(tmp_path: Path) -> Iterator[AgentGroup]:
    made = AgentGroup(tmp_path)
    yield made
    made.close()


def there(group: AgentGroup) -> dict[int, int]:
    """Return the processes of the ranks that have done their steps."""
    found = {int(path.name.split("-")[2]): int(path.name.split("-")[1]) for path in group.folder.glob("there-*")}
    return {rank: pid for pid, rank in found.items() if psutil.pid_exists(pid)}


def start_agents(group: AgentGroup, *more: str, of_first: tuple[str, ...] = ()) -> None:
    """Start the agents of two hosts; ``more`` are options of both, and ``of_first`` of the first."""
    for name in ("one", "two"):
        group.start(name, *more, *(of_first if name == "one" else ()))
        eventually(lambda name=name: group.host(name) is not None, name)  # type: ignore[misc]


def start(group: AgentGroup, *more: str) -> subprocess.Popen[bytes]:
    """Run a rank on each of two hosts, to where rank 1 sleeps and rank 0 waits for it."""
    launcher = group.launch(
        PROGRAM,
        options=("--nnodes", "2:2", "--last-call", "60", "--silent-after", "off", *more),
    )
    eventually(lambda: len(there(group)) == RANKS, "the ranks of both hosts")
    return launcher


def test_each_agent_shows_the_timeline_the_culprit_and_the_stacks_of_all_hosts(group: AgentGroup, run: Run) -> None:
    start_agents(group, of_first=(*SHOWN, "--metrics=127.0.0.1:0"))
    of_agent = url_of(group, "one")
    served = re.search(r"metrics are at (http://\S+)", group.output("one"))
    assert served is not None
    assert see(of_agent, lambda one: True, "a page without a job")["sentence"] == "No rank has started yet."

    logs = group.folder / "logs"
    launcher = start(group, *SHOWN, "--log-dir", str(logs))
    one, two = (str(group.agents[name].pid) for name in ("one", "two"))
    of_launcher = url_of(group, "launch")
    for url in (of_launcher, of_agent):
        picture = see(url, shows_both, "both hosts on the page")
        eventually(lambda url=url: spoken(url) == RANKS, "the output of both hosts")  # type: ignore[misc]
        assert picture["phase"] == "running"
        assert (picture["job"], picture["command"].split()[0]) == ("job.py", str(group.folder / "job.py"))
    flight = ask(of_launcher, "flight")
    assert (flight["ranks"], flight["problems"]) == (RANKS, [])
    assert "spoken by a rank" in [line["text"] for line in ask(of_launcher, "output?ranks=1")]
    with urllib.request.urlopen(served[1]) as answer:
        metrics = answer.read().decode()
    assert 'asyncpar_up{host="one"' in metrics
    assert 'host="two"' not in metrics

    for agent in (one, two):

        def sees_both(agent: str = agent) -> bool:
            status = run("status", "--json", agent)
            hosts = json.loads(status.stdout)["hosts"] if status.returncode == 0 else []
            seen = [(rank["rank"], rank["host"]) for host in hosts for rank in host.get("ranks", ())]
            return sorted(seen) == [(0, "one"), (1, "two")]

        eventually(sees_both, f"the ranks of both hosts at {agent}")
    assert json.loads(run("logs", "--json", "-r", "0,1", two).stdout) == {
        "0": ["spoken by a rank"],
        "1": ["spoken by a rank", "rank 1 sleeps"],
    }

    done = run("trace", "--seconds", "0", "--before", "600", "--json", "-o", "t.json", one)
    assert done.returncode == 0, done.stderr
    assert "events of 2 ranks" in done.stdout
    events = json.loads((group.folder / "t.json").read_bytes())["traceEvents"]
    flows = {phase: {event["id"]: event for event in events if event["ph"] == phase} for phase in "sf"}
    assert flows["s"].keys() == flows["f"].keys()
    assert len(flows["s"]) == 40 * RANKS
    assert all(flows["f"][flow]["ts"] >= begun["ts"] for flow, begun in flows["s"].items()), "an arrow goes back"
    crossed = Counter((begun["pid"], flows["f"][flow]["pid"]) for flow, begun in flows["s"].items())
    assert len(crossed) == RANKS
    assert set(crossed.values()) == {40}

    def is_found() -> bool:  # once rank 1 has reported that it sleeps
        return run("flight", "explain", "--job", one).stdout.startswith("rank 1: sleeping\n")

    eventually(is_found, "the rank that sleeps")
    done = run("flight", "dump", "--torch", "-o", "dump", two)
    assert done.returncode == 0, done.stderr
    files = {file.name for file in (group.folder / "dump").iterdir()}
    assert files >= {
        f"{prefix}{rank}{suffix}"
        for rank in range(RANKS)
        for prefix, suffix in (("rank_", ".ring"), ("torch_rank_", ""))
    }
    for found in (run("flight", "explain", "dump"), run("flight", "explain", "--job", one)):
        assert found.stdout.startswith("rank 1: sleeping\n"), found
        assert "rank 0 waits for rank 1 in barrier()" in found.stdout, found

    stopped = there(group)[0]
    stop_process(stopped)
    stacks = json.loads(run("stacks", "--json", two).stdout)
    assert (sorted(stacks["ranks"]), stacks["silent"]) == (["0", "1"], {})
    assert "is stopped" in stacks["ranks"]["0"]["text"], stacks["ranks"]
    os.kill(stopped, signal.SIGCONT)

    launcher.terminate()
    ended = see(of_launcher, lambda one: bool(one["ended"]), "the end")
    assert ended["ended"].startswith("The job has ended with exit code 143.")
    assert launcher.wait(timeout=60) == 143
    document = json.loads((logs / "run.json").read_text())
    assert set(hosts_of(document["picture"]).values()) == {"one", "two"}
    made = run("report", "logs", "-o", "page.html")
    assert made.returncode == 0, made.stderr
    inside = (group.folder / "page.html").read_text().partition('id="document">')[2].partition("</script>")[0]
    picture = json.loads(inside)["picture"]
    assert {row["rank"]: row["host"] for row in picture["ranks"]} == {0: "one", 1: "two"}
    assert picture["ended"].startswith("The job has ended with exit code 143.")


@pytest.mark.soak
def test_a_killed_rank_leaves_a_post_mortem_on_each_host(group: AgentGroup) -> None:
    remains = group.folder / "remains"
    start_agents(group, "--post-mortem", str(remains))
    launcher = start(group, "--max-restarts", "0")
    os.kill(there(group)[1], signal.SIGKILL)
    assert launcher.wait(timeout=60) != 0
    summaries = {}
    for rank, host in enumerate(("one", "two")):
        [folder] = remains.glob(f"job.py.1-{host}-*")
        eventually((folder / "summary.txt").exists, f"the summary of {host}")
        summaries[host] = (folder / "summary.txt").read_text()
        assert {path.name.partition("-")[2] for path in (folder / "rings").iterdir()} == {f"{rank}.ring"}
    assert "rank 1: was killed by SIGKILL" in summaries["two"]
    assert "last operation: barrier #41 of world, called at job.py:" in summaries["one"]
