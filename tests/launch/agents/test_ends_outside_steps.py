"""A job whose ranks all end with an exception between their steps does not wait for them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.launch.agents.agent_groups import AgentGroup, eventually

pytestmark = [pytest.mark.process, pytest.mark.timeout(180)]

PROGRAM = """
    import asyncio, os
    from pathlib import Path
    import numpy as np
    import asyncpar as ap

    async def main():
        name = os.getppid()  # that of the agent
        weight = np.zeros(4, np.float32)
        async with ap.elastic(portions=2) as job:
            state = job.state({"weight": weight})
            async for step in job.steps(state, until=30):
                if step.number == 10 and not Path(f"failed-{name}").exists():
                    Path(f"failed-{name}").touch()
                    raise ValueError("between two steps")
                async with step:
                    for portion in step.portions:
                        step.add(portion, [np.ones(4, np.float32)])
                        await asyncio.sleep(0.01)
                    weight += (await step.reduce())[0]

    ap.run(main())
"""


@pytest.fixture
def group(tmp_path: Path) -> Iterator[AgentGroup]:
    made = AgentGroup(tmp_path)
    yield made
    made.close()


@pytest.mark.soak
def test_a_job_whose_ranks_all_crash_between_two_steps_ends_or_begins_anew(group: AgentGroup) -> None:
    group.start_all("one", "two")
    options = ("--nnodes", "2:2", "--elastic", "ranks", "--max-restarts", "3", "--last-call", "1")
    launcher = group.launch(PROGRAM, options=options)
    eventually(lambda: launcher.poll() is not None, "the end of the job")
    assert len(list(group.folder.glob("failed-*"))) == 2
    assert "all members are lost" in group.output("launch")
