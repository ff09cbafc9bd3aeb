"""Agents on three hosts, which are network namespaces on one bridge, whose ways to each other are cut and come back."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from tests.elasticity.training import encode, train
from tests.launch.agents.agent_groups import TRAINING, AgentGroup, eventually
from tests.soak import chosen, is_soak

pytestmark = [pytest.mark.process, pytest.mark.timeout(240)]

NAMES = ("one", "two", "three")
UNTIL = chosen(900, soak=1300)
NOWHERE = "02:00:00:00:00:01"


class Bridged(AgentGroup):
    """Agents in namespaces; the test reaches them all, whatever is cut between them."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.tag = f"apg{os.getpid() % 100_000}"
        self.hub = f"{self.tag}h"

    def build(self) -> None:
        """Make the namespaces.  Skips, and says why, where that is not allowed."""
        if os.geteuid() != 0 or shutil.which("ip") is None:
            pytest.skip("network namespaces need root and the ip command (iproute2)")
        hub, up = self.hub, "link set"
        commands = [f"netns add {hub}", f"-n {hub} link add br0 type bridge", f"-n {hub} {up} br0 up"]
        commands += [f"link add {hub} type veth peer name {hub} netns {hub}", f"-n {hub} {up} {hub} master br0 up"]
        commands += [f"addr add 10.213.8.254/24 dev {hub}", f"{up} {hub} up"]
        for name in NAMES:
            space = self.space(name)
            commands += [
                f"netns add {space}",
                f"link add eth0 netns {space} type veth peer name {space} netns {hub}",
                f"-n {hub} {up} {space} master br0 up",
                f"-n {space} addr add {self.host_of(name)}/24 dev eth0",
                f"-n {space} {up} eth0 up",
                f"-n {space} {up} lo up",
            ]
        for command in commands:
            made = subprocess.run(["ip", *command.split()], capture_output=True, text=True, check=False)
            if made.returncode != 0:
                pytest.skip(f"network namespaces cannot be made here: ip {command}: {made.stderr.strip()}")

    def space(self, name: str) -> str:
        return f"{self.tag}{NAMES.index(name)}"

    def host_of(self, name: str) -> str:
        return f"10.213.8.{NAMES.index(name) + 1}"

    def within(self, name: str) -> tuple[str, ...]:
        return ("ip", "netns", "exec", self.space(name))

    def cut(self, source: str, target: str) -> None:
        """Let nothing get from one host to the other, without a word."""
        self._neighbour("replace", source, target, "lladdr", NOWHERE, "nud", "permanent")

    def heal(self) -> None:
        """End all cuts."""
        for source in NAMES:
            for target in NAMES:
                if source != target:
                    self._neighbour("del", source, target)

    def _neighbour(self, verb: str, source: str, target: str, *more: str) -> None:
        command = ["ip", "-n", self.space(source), "neigh", verb, self.host_of(target), *more, "dev", "eth0"]
        subprocess.run(command, capture_output=True, check=verb != "del")

    def isolate(self, name: str, *, receives: bool = False) -> None:
        for other in NAMES:
            if other != name:
                self.cut(name, other)
                if not receives:
                    self.cut(other, name)

    def reached(self, pid: int) -> int:
        """The last step that a rank has noted."""
        return int((self.folder / f"step-{pid}").read_text().split()[0])

    def has_gone_on(self, pids: list[int], step: int) -> bool:
        return max(map(self.reached, pids)) > step

    def has_parked(self, name: str) -> bool:
        return "no quorum" in self.output(name)

    def dismantle(self) -> None:
        for name in NAMES:
            subprocess.run(["ip", "netns", "del", self.space(name)], capture_output=True, check=False)
        subprocess.run(["ip", "netns", "del", self.hub], capture_output=True, check=False)


@pytest.fixture
def group(tmp_path: Path) -> Iterator[Bridged]:
    made = Bridged(tmp_path)
    try:
        made.build()
        yield made
    finally:
        made.close()
        made.dismantle()


@pytest.mark.soak
def test_a_minority_parks_and_commits_nothing_and_comes_back(group: Bridged) -> None:
    wanted = encode(asyncio.run(train(None, until=UNTIL, pause=0.0)))
    group.start_all(*NAMES)
    options = ("--nnodes", "1:3", "--elastic", "ranks", "--last-call", "30")
    launcher = group.launch(TRAINING, str(UNTIL), options=options)
    eventually(lambda: group.trains(3), "training on three hosts")
    leader = group.leader()
    follower = next(name for name in NAMES if name != leader)
    cuts = (("leader", leader), ("one-way", follower), *((("symmetric", follower),) if is_soak() else ()))
    for kind, victim in cuts:
        rest = [name for name in NAMES if name != victim]
        (pid,) = group.pids(victim)
        others = [pid for name in rest for pid in group.pids(name)]
        group.isolate(victim, receives=kind == "one-way")
        time.sleep(0.5)  # what is under way has arrived, or will not
        before, apart = max(map(group.reached, others)), group.reached(pid)
        eventually(partial(group.has_gone_on, others, before + 1), f"steps without {victim}")
        assert group.reached(pid) <= apart + 1, f"{victim} has gone on alone"
        if kind != "one-way":
            eventually(partial(group.has_parked, victim), "the parking")
        group.heal()
        group.train_on(3, f"training with {victim} again")
    (group.folder / "hurry").touch()
    assert launcher.wait(timeout=90) == 0, group.output("launch")
    assert {json.dumps(json.loads(result)[:-1]) for result in group.results() if not json.loads(result)[-1]} == {
        json.dumps(json.loads(wanted)[:-1])
    }
