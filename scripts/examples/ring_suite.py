"""A suite for pytest: a ring that works, and one in which everybody receives first.  The second test fails on purpose.

pytest scripts/examples/ring_suite.py
"""

import sys

import numpy as np

import asyncpar as ap

try:
    import pytest
except ModuleNotFoundError:
    sys.exit("ring_suite: there is no pytest: pip install pytest")


async def pass_on(node: ap.Node) -> float:
    """Send a number around the ring, and return what came."""
    right, left = (node.rank + 1) % node.size, (node.rank - 1) % node.size
    await node.world.send(np.full(1, float(node.rank)), right)  # a small message does not wait for its receiver
    return float((await node.world.recv(left))[0])


@pytest.mark.parametrize("transport", ["inproc", "shm", "tcp"])
def test_the_ring_turns(world, transport: str) -> None:  # type: ignore[no-untyped-def]
    assert world(3, transport=transport).run(pass_on) == [2.0, 0.0, 1.0]


@pytest.mark.ranks(3, timeout=2)
async def test_everybody_receives_first(node: ap.Node) -> None:
    right, left = (node.rank + 1) % node.size, (node.rank - 1) % node.size
    await node.world.recv(left)  # the report names this line, on all ranks, and the cycle
    await node.world.send(np.zeros(1), right)


if __name__ == "__main__":
    sys.exit("ring_suite: it is a suite of tests; run it with: pytest scripts/examples/ring_suite.py")
