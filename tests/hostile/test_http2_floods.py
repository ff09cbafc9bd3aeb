"""Floods of frames without the secret, to every gRPC port of a job: it goes on, and gives the memory back."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.hostile.floods import Flooded, eventually, many_descriptors, terminate
from tests.hostile.http2_floods import FLOODS, Http2Flood, is_grpc
from tests.hostile.test_floods import elastic, go_on
from tests.soak import chosen

pytestmark = [
    pytest.mark.process,
    pytest.mark.timeout(240),
    pytest.mark.skipif(not Path("/proc/net/unix").exists(), reason="needs /proc"),
]

FEW = ("endless headers", "calls", "resets")
"""Floods that different limits end."""

CUTS = chosen(1, soak=8)
"""How often each port has cut a flood of each kind off before we look."""

EACH = 8
"""Connections of a flood of one kind to each port; of all kinds at once, one each."""

KEPT = 128 << 20
"""Most bytes of memory that a process keeps of a flood."""


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Flooded]:
    with many_descriptors():
        made = Flooded(tmp_path, descriptors=1024)
        yield made
        made.close()


@pytest.mark.parametrize("kinds", chosen([FEW], soak=[tuple(FLOODS), *((kind,) for kind in FLOODS)]), ids=", ".join)
def test_a_job_goes_on_while_its_servers_are_flooded_and_gives_the_memory_back(
    job: Flooded, kinds: tuple[str, ...]
) -> None:
    process = elastic(job)
    eventually(lambda: len(job.steps()) == 2, job.said)
    tcp = {address[1]: pid for address, pid in job.listening().items() if isinstance(address, tuple)}
    ports = {port: pid for port, pid in tcp.items() if is_grpc(port)}
    assert len(set(ports.values())) == 3, "the launcher and both ranks"
    before = {pid: psutil.Process(pid).memory_info().rss for pid in ports.values()}

    def kept() -> dict[int, int]:
        return {pid: psutil.Process(pid).memory_info().rss - rss for pid, rss in before.items()}

    with Http2Flood(list(ports), kinds, each=EACH if len(kinds) == 1 else 1) as flood:
        eventually(lambda: min(flood.cut.values()) >= CUTS, lambda: f"{flood.cut} {flood.sent}")
        go_on(job)
    go_on(job)
    eventually(lambda: max(kept().values()) < KEPT, lambda: f"{kept()}")
    assert terminate(process) == 143, job.said()
