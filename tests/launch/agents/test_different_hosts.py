"""Hosts of real agents whose program computes otherwise than that of the others."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from asyncpar.launch.agents.views import show_group
from tests.launch.agents.agent_groups import AgentGroup, eventually

pytestmark = [pytest.mark.process, pytest.mark.timeout(180)]

OPTIONS = ("--nnodes", "2:3", "--elastic", "ranks", "--last-call", "0", "--max-restarts", "6")

PROGRAM = """
    import os, time
    from pathlib import Path
    import asyncpar as ap
    from tests.elasticity.test_different_hosts import change_a_bit
    from tests.elasticity.training import train

    other = Path("other")  # the steps after which this host, as it starts now, has another state
    differs_from = int(other.read_text()) if other.exists() else None
    joined_at = None

    def on_step(place, step):
        global joined_at
        if place == "computed":
            Path(f"new-{os.getpid()}").write_text(f"{step.number} {step.world.size if not step.is_replay else 0}")
            os.replace(f"new-{os.getpid()}", f"step-{os.getpid()}")
            if not step.is_replay:
                joined_at = step.number if joined_at is None else joined_at
                time.sleep(0.05)
        if place == "updated" and differs_from is not None:
            if differs_from == 0 or (joined_at is not None and step.number == joined_at + differs_from):
                change_a_bit(step)

    ap.run(train(None, until=100_000, on_step=on_step, pause=0.0))
"""


@pytest.fixture
def group(tmp_path: Path) -> Iterator[AgentGroup]:
    made = AgentGroup(tmp_path)
    yield made
    made.close()


def generation(group: AgentGroup) -> int | None:
    view = group.view()
    return None if view is None else view.generation


@pytest.mark.soak
def test_a_host_that_computes_otherwise_is_named_and_backs_off_and_the_others_notice_nothing(group: AgentGroup) -> None:
    group.start_all("one", "two")
    launcher = group.launch(PROGRAM, options=OPTIONS)
    eventually(lambda: group.trains(2, beyond=5), "training on two hosts")
    other = group.folder / "other"
    other.write_text("0")
    group.start("three")
    eventually(
        lambda: "rank three/0 exited with code 1; it starts again in 1 s (restart 3 of 6)" in group.output("three")
    )
    view = group.view()
    assert view is not None
    assert (view.generation, view.world_size) == (0, 2), "the others have noticed"
    why = (
        r"rank three/0 is not admitted: its step \d+ has another digest than the group's; the program or its libraries"
    )
    assert len(re.findall(why, group.output("three"))) == 1, "it is said once"
    assert re.search(why, show_group(view, width=None))
    reached = group.step()
    eventually(lambda: group.trains(2, beyond=reached + 3), "training as before")

    other.unlink()  # and the host is mended
    eventually(lambda: group.trains(3, beyond=reached), "training with the mended host")
    view = group.view()
    assert view is not None
    assert view.generation == 1, "one world for the one change"
    assert "not admitted" not in show_group(view, width=None)
    launcher.kill()


@pytest.mark.soak
def test_a_host_that_computes_otherwise_later_is_reported_by_name_and_no_worlds_follow(group: AgentGroup) -> None:
    group.start_all("one", "two")
    launcher = group.launch(PROGRAM, options=OPTIONS)
    eventually(lambda: group.trains(2, beyond=5), "training on two hosts")
    (group.folder / "other").write_text("4")
    group.start("three")
    assert launcher.wait(timeout=90) != 0, group.output("launch")
    assert re.search(r"rank 2 on three has another state after step \d+ than the others", group.output("launch"))
    changes = [line for name in group.agents for line in group.output(name).splitlines() if "generation " in line]
    assert max(int(number) for line in changes for number in re.findall(r"generation (\d+)", line)) <= 2, changes
