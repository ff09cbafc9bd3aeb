"""Ranks on a real Ray cluster on this host; ``scripts/test-ray`` has ray."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import asyncpar as ap
from asyncpar.testing import engine_programs as programs
from asyncpar.testing.engines import EngineConformance, EngineOutput
from tests.engines.consoles import RecordingConsole

ray = pytest.importorskip("ray", reason="ray (extra ray) is not installed; scripts/test-ray has it")

pytestmark = [
    pytest.mark.process,
    pytest.mark.timeout(600),  # Ray Train starts six processes, each of which imports for seconds
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False)
    yield
    ray.shutdown()


def test_object_references_among_the_arguments_are_the_values_for_the_ranks() -> None:
    one, more = ray.put(np.arange(3.0)), [ray.put(1), {"two": ray.put(2)}]
    [(array, numbers)] = ap.ray.run(programs.echo, (one, more), ranks=1, console=RecordingConsole())
    np.testing.assert_array_equal(array, np.arange(3.0))
    assert numbers == [1, {"two": 2}]


class TestRay(EngineConformance):
    async def launch(
        self,
        function: Callable[..., Any],
        *arguments: Any,
        ranks: int,
        output: EngineOutput | None = None,
        **options: Any,
    ) -> list[Any]:
        return await ap.ray.launch(
            function,
            *arguments,
            ranks=ranks,
            resources={"CPU": 0.5},
            console=RecordingConsole(output),
            per_place=2,
            **options,
        )


def test_a_blocking_run_spreads_ranks_over_bundles() -> None:
    seen = ap.ray.run(programs.describe, ranks=2, placement="SPREAD", console=RecordingConsole())
    assert [one["GROUP_RANK"] for one in seen] == [0, 1]


async def test_more_than_the_cluster_has_is_reported_at_once() -> None:
    with pytest.raises(ap.UsageError, match=r"99 CPU in 99 bundles, this cluster of Ray has 4"):
        await ap.ray.launch(programs.add, 1, 2, ranks=99)
    with pytest.raises(ap.UsageError, match="placement: expected one of"):
        await ap.ray.launch(programs.add, 1, 2, ranks=1, placement="WIDE")


async def test_bounds_for_an_elastic_job_are_refused_with_what_takes_them() -> None:
    elastic: Any = (1, 2)
    with pytest.raises(ap.UsageError, match=r"got \(1, 2\); elastic jobs run with ap.cluster .*, with ap.dask"):
        await ap.ray.launch(programs.add, 1, 2, ranks=elastic)


async def test_the_death_of_an_actor_reaches_the_caller(tmp_path: Path) -> None:
    launching = asyncio.ensure_future(
        ap.ray.launch(programs.linger, str(tmp_path), ranks=1, console=RecordingConsole())
    )
    pid = int(await asyncio.to_thread(_wait_for_file, tmp_path))
    agent = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    os.kill(agent, signal.SIGKILL)
    with pytest.raises(ExceptionGroup) as failed:
        await launching
    assert isinstance(failed.value.exceptions[0], ap.PeerLost)
    assert "Ray's bundle 0 died" in str(failed.value)


def train_loop(config: dict[str, str]) -> None:
    import asyncpar.blocking

    with asyncpar.blocking.init() as node:
        x = np.full(3, node.rank + 1.0)
        node.world.all_reduce(x, timeout=30)
        seen = {"sum": float(x[0]), "size": node.size, "secret": os.environ["ASYNCPAR_SECRET_FILE"]}
        Path(config["out"], str(node.rank)).write_text(json.dumps(seen))


def test_workers_of_ray_train_are_ranks(tmp_path: Path) -> None:
    from ray.train import RunConfig, ScalingConfig
    from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer

    trainer = DataParallelTrainer(
        train_loop,
        train_loop_config={"out": str(tmp_path)},
        backend_config=ap.ray.AsyncparConfig(),
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(storage_path=str(tmp_path / "results")),
    )
    trainer.fit()
    for rank in range(2):
        seen = json.loads((tmp_path / str(rank)).read_text())
        assert (seen["sum"], seen["size"]) == (3.0, 2)
        assert not Path(seen["secret"]).parent.exists()


def torch_loop(config: dict[str, str]) -> None:
    import torch
    import torch.distributed as dist
    from ray.train.torch import prepare_model

    x = torch.full((3,), dist.get_rank() + 1.0)
    dist.all_reduce(x)
    model = prepare_model(torch.nn.Linear(2, 1))
    model(torch.full((1, 2), dist.get_rank() + 1.0)).sum().backward()
    seen = {
        "sum": x.tolist(),
        "backend": dist.get_backend(),
        "model": type(model).__name__,
        "gradient": next(model.parameters()).grad.tolist(),
    }
    Path(config["out"], str(dist.get_rank())).write_text(json.dumps(seen))


def test_torch_programs_of_ray_train_have_the_backend_by_its_name(tmp_path: Path) -> None:
    from ray.train import RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    trainer = TorchTrainer(
        torch_loop,
        train_loop_config={"out": str(tmp_path)},
        torch_config=TorchConfig(backend="asyncpar"),
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(storage_path=str(tmp_path / "results")),
    )
    trainer.fit()
    for rank in range(2):
        assert json.loads((tmp_path / str(rank)).read_text()) == {
            "sum": [3.0, 3.0, 3.0],
            "backend": "asyncpar",
            "model": "DistributedDataParallel",
            "gradient": [[1.5, 1.5]],
        }


def _wait_for_file(folder: Path) -> str:
    deadline = time.monotonic() + 60.0
    while not (found := os.listdir(folder)):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return found[0]
