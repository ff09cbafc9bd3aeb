"""Jobs on a host with no address but ``::1``: as on any other, whatever starts them."""

from __future__ import annotations

import re
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from asyncpar.net.membership.credentials import create_secret
from tests.ipv6 import only_ipv6

pytestmark = pytest.mark.process
ROOT = Path(__file__).parents[2]
Launcher = Any  # the class lives in conftest.py

RING = """
    import asyncio
    import numpy as np
    import asyncpar as ap

    async def main():
        async with ap.init() as node:
            x = np.full(3, rank + 1.0)
            await node.world.all_reduce(x)
            print("sum", x[0], os.environ["ASYNCPAR_BIND"], flush=True)

    asyncio.run(main())
"""
ELASTIC = """
    import os
    import asyncpar as ap
    from tests.elasticity.training import encode, train
    encode(ap.run(train(None, until=3, pause=0.0)))
    print("trained at", os.environ["ASYNCPAR_BIND"], flush=True)
"""
SERVING = """
    import asyncio
    import numpy as np
    import asyncpar as ap
    from asyncpar.testing import local_world

    async def train(x):
        async with ap.init() as node:
            y = np.full(2, x)
            await node.world.all_reduce(y)
            return float(y[0])

    async def main():
        for serve in ("[::1]:0", "localhost:0"):
            node = await ap.Node.start(serve=serve)
            print(node.address, flush=True)
            await node.stop()
        print(await ap.cluster.launch(train, 2.0, ranks=2), flush=True)
        async with local_world(2, transport="tcp") as nodes:
            sums = [np.full(2, 3.0) for _ in nodes]
            await asyncio.gather(*(node.world.all_reduce(y) for node, y in zip(nodes, sums)))
            print([float(y[0]) for y in sums], flush=True)

    if __name__ == "__main__":
        asyncio.run(main())
"""


@pytest.mark.soak
@pytest.mark.parametrize(
    "options",
    [
        (),
        ("--rdzv-endpoint", "[::1]:29555"),
        ("--rdzv-endpoint", "localhost:29555", "--transport", "tcp"),
        ("--master-addr", "::1", "--transport", "grpc"),
        ("--transport", "tcp", "--dashboard", "--metrics"),
    ],
    ids=" ".join,
)
def test_ranks_meet(launcher: Launcher, options: tuple[str, ...]) -> None:
    script = launcher.script(RING)
    process = launcher.start("--nproc-per-node", "2", *options, script, prefix=only_ipv6())
    done = launcher.finish(process)
    assert sorted(re.findall(r"sum (\S+) (\S+)", done.stdout + done.stderr)) == [("3.0", "::1")] * 2, done.stderr
    for page, address in (("--dashboard", "http://[::1]:8787/#token="), ("--metrics", "http://[::1]:9464/metrics")):
        assert (address in done.stderr) is (page in options)


def test_launchers_meet(launcher: Launcher, tmp_path: Path) -> None:
    create_secret(tmp_path / "secret")
    script, words = launcher.script(RING), ("--nnodes", "2", "--rdzv-endpoint", "[::1]:29555", "--transport", "tcp")
    both = " & ".join(f'"$@" --node-rank {number} {script}' for number in (0, 1))
    command = ["sh", "-c", f"{both} & wait", "sh", sys.executable, "-m", "asyncpar", "launch", *words]
    done = here([*command, "--secret-file", str(tmp_path / "secret")], launcher.directory)
    assert sorted(re.findall(r"sum (\S+) (\S+)", done.stdout + done.stderr)) == [("3.0", "::1")] * 2, done.stderr


@pytest.mark.soak
def test_agents_find_each_other(launcher: Launcher) -> None:
    script = launcher.directory / "job.py"
    script.write_text(textwrap.dedent(ELASTIC))
    options = ("--elastic", "ranks", "--nproc-per-node", "2")
    done = launcher.finish(launcher.start(*options, str(script), prefix=only_ipv6(), env={"PYTHONPATH": str(ROOT)}))
    assert (done.stdout + done.stderr).count("trained at ::1") == 2, done.stderr


@pytest.mark.soak
def test_programs_serve_and_start_ranks(tmp_path: Path) -> None:
    script = tmp_path / "serving.py"
    script.write_text(textwrap.dedent(SERVING))
    done = here([sys.executable, str(script)], tmp_path)
    assert re.fullmatch(r"(\[::1\]:\d+\n){2}\[4\.0, 4\.0\]\n\[6\.0, 6\.0\]\n", done.stdout), done.stderr


def test_the_doctor_finds_loopback(tmp_path: Path) -> None:
    done = here([sys.executable, "-m", "asyncpar", "doctor"], tmp_path)
    assert re.search(r"ok +loopback +::1 connects", done.stdout), done.stdout + done.stderr


def here(command: list[str], directory: Path) -> subprocess.CompletedProcess[str]:
    """Run ``command`` on a host that has only IPv6; nothing that it starts outlives it."""
    bounded = ["timeout", "90", *only_ipv6(), *command]
    return subprocess.run(bounded, cwd=directory, capture_output=True, text=True, check=False, timeout=120)
