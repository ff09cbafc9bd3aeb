"""Two hosts with two ranks each, as far as sockets can tell."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from asyncpar.nn.optimizers import Optimizer
from scripts.bench.namespaces import End, NoNamespacesError, wire
from tests.multinode import network_rank
from tests.multinode.network_rank import MICRO_STEPS, RATE, RULE, STEPS, WAYS, Model

pytestmark = pytest.mark.process

NODES, DEVICES = 2, 2
LIMIT = 50.0


@pytest.fixture
def ends() -> Iterator[tuple[End, End]]:
    """Two network namespaces and a wire."""
    try:
        with wire(1_000_000_000) as both:
            yield both
    except NoNamespacesError as error:
        pytest.skip(str(error))


def launch(ends: tuple[End, End], directory: Path) -> list[subprocess.Popen[str]]:
    """Start an agent on each side, whose ranks run ``network_rank``."""
    secret = directory / "secret"
    secret.write_bytes(os.urandom(32))
    secret.chmod(0o600)
    job = ["--nnodes", str(NODES), "--nproc-per-node", str(DEVICES), "--rdzv-endpoint", f"{ends[0].address}:29400"]
    start = [sys.executable, "-m", "asyncpar", "launch", *job, "--secret-file", str(secret)]
    program = [str(Path(network_rank.__file__)), str(NODES), str(DEVICES), str(directory)]
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("ASYNCPAR_", "COV_"))}
    return [
        subprocess.Popen(
            end.enter([*start, "--node-rank", str(node), *program]),
            cwd=Path(__file__).parents[2],
            env=kept | {"TMPDIR": str(directory)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for node, end in enumerate(ends)
    ]


def train_on_hosts(ends: tuple[End, End], directory: Path) -> list[dict[str, Any]]:
    """Return the reports of all ranks."""
    agents = launch(ends, directory)
    try:
        output = [agent.communicate(timeout=LIMIT)[0] for agent in agents]
    finally:
        for agent in agents:
            agent.kill()
            agent.communicate()
    assert [agent.returncode for agent in agents] == [0, 0], "\n".join(output)
    return [json.loads((directory / f"{rank}.json").read_text()) for rank in range(NODES * DEVICES)]


def train_alone() -> tuple[list[list[float]], Model]:
    """Return the losses of each rank's batches, and the model, as one process computes them."""
    ranks = range(NODES * DEVICES)
    model, losses = Model(), [[] for _ in ranks]  # type: tuple[Model, list[list[float]]]
    optimizer = Optimizer(model.parameters, RULE)
    for step in range(STEPS):
        for rank in ranks:
            losses[rank].append(sum(model.train(step, rank, micro) for micro in range(MICRO_STEPS)) / MICRO_STEPS)
        optimizer.scale(1.0 / (len(ranks) * MICRO_STEPS))
        optimizer.step(RATE)
        optimizer.zero_grad()
    return losses, model


@pytest.mark.soak
def test_two_hosts_train_as_one_process_and_send_each_other_what_one_rank_would(
    ends: tuple[End, End], tmp_path: Path
) -> None:
    reports = train_on_hosts(ends, tmp_path)
    losses, alone = train_alone()
    for way in WAYS:
        assert len({report[way]["digest"] for report in reports}) == 1, f"{way}: all ranks hold the same bits"
    for way, tolerance in (("replicated", 1e-12), ("sharded", 1e-12), ("compressed", 1e-2)):
        for rank, report in enumerate(reports):
            np.testing.assert_allclose(report[way]["losses"], losses[rank], rtol=tolerance, atol=0)
        for parameter in alone.parameters:
            got = reports[0][way]["values"][parameter.name]
            np.testing.assert_allclose(got, parameter.value.ravel()[:3], rtol=0, atol=tolerance * 10)
    gradients = STEPS * sum(parameter.value.nbytes for parameter in alone.parameters)
    for first in (0, 2):
        left = {way: max(report[way]["left"] for report in reports[first : first + 2]) for way in WAYS}
        assert gradients <= left["replicated"] < 1.1 * gradients, "2 (2 - 1) / 2 of the gradients, and headers"
        assert left["compressed"] < gradients / 5, "8 bits in place of 64"
