"""The command of the manifests in simulated pods: names that come late, and pods that are asked to end."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from asyncpar.launch.kubernetes.manifests import KubernetesJob, make_manifests
from scripts.bench.namespaces import NoNamespacesError
from scripts.bench.pods import RunningPod, finish, running_pods
from tests.soak import first

ROOT = Path(__file__).parents[3]
LIMIT = 150.0
pytestmark = [
    pytest.mark.process,
    pytest.mark.timeout(200),
    pytest.mark.skipif(
        os.geteuid() != 0 or shutil.which("ip") is None,
        reason="network namespaces need root and the ip command (iproute2)",
    ),
]


@contextmanager
def pods_of(
    *arguments: str,
    program: Path = ROOT / "tests" / "launchers" / "ranks.py",
    name: str = "train",
    is_jobset: bool = True,
    max_restarts: int = 0,
    ranks: int = 2,
    names_after: float | None,
) -> Iterator[list[RunningPod]]:
    """Run two pods of ``ranks`` ranks each of ``program``."""
    job = KubernetesJob(
        image="none",
        program=str(program),
        arguments=arguments,
        name=name,
        nodes=2,
        tasks_per_node=ranks,
        max_restarts=max_restarts,
        secret=os.urandom(32),
        python=sys.executable,
        is_jobset=is_jobset,
    )
    try:
        with running_pods(make_manifests(job), names_after=names_after) as pods:
            yield pods
    except NoNamespacesError as error:
        pytest.skip(str(error))


def make_names_known(pods: list[RunningPod], *, waits_for: str) -> None:
    """Let pods find each other once the second one has said that it waits for the name of the first."""
    said = pods[1].process.stdout
    assert said is not None
    assert any(f"waiting for the host name {waits_for}\n" in line for line in said)
    for pod in pods:
        pod.know(pods)


@pytest.mark.soak
@pytest.mark.parametrize(
    ("is_jobset", "names"), [(True, ["train-ranks-0-0", "train-ranks-0-1"]), (False, ["train-0", "train-1"])]
)
def test_pods_meet_when_their_names_come_to_be_known(is_jobset: bool, names: list[str]) -> None:
    with pods_of("sum", is_jobset=is_jobset, names_after=None) as pods:
        assert [pod.spec.host_name for pod in pods] == names
        make_names_known(pods, waits_for=f"{names[0]}.train")
        ended = finish(pods, timeout=LIMIT)
    assert [code for code, _ in ended] == [0, 0], ended
    hosts = f"{names[0]},{names[0]},{names[1]},{names[1]}"
    for rank in range(4):
        assert f"rank {rank} of 4 sum 10 hosts {hosts}" in ended[rank // 2][1]


def wait_for_ranks(pods: list[RunningPod], folder: Path, count: int) -> None:
    until = time.monotonic() + LIMIT
    while len(list(folder.glob("pid-*"))) < count:
        assert time.monotonic() < until, f"{count} ranks did not start"
        assert all(pod.process.poll() is None for pod in pods), finish(pods, timeout=LIMIT)
        time.sleep(0.1)


def ask_to_end(pod: RunningPod) -> None:
    """Do as a kubelet does."""
    [first] = psutil.Process(pod.process.pid).children()
    first.send_signal(signal.SIGTERM)


@pytest.mark.parametrize(("asked", "ranks"), first(1, [((1,), 1), ((1,), 2), ((0, 1), 2)]))
def test_when_pods_are_asked_to_end_all_ranks_write_their_checkpoints(
    tmp_path: Path, asked: tuple[int, ...], ranks: int
) -> None:
    with pods_of("saving", str(tmp_path), ranks=ranks, names_after=0.1) as pods:
        wait_for_ranks(pods, tmp_path, 2 * ranks)
        for pod in asked:
            ask_to_end(pods[pod])
        finish(pods, timeout=LIMIT)
    saved = {path.name: path.read_text() for path in tmp_path.glob("saved-*")}
    assert saved == {f"saved-{rank}": f"rank {rank} of {2 * ranks}" for rank in range(2 * ranks)}


@pytest.mark.soak
def test_a_pod_that_is_asked_to_end_lets_its_ranks_leave_and_ends_the_job(tmp_path: Path) -> None:
    with pods_of("endless", str(tmp_path), names_after=0.1) as pods:
        wait_for_ranks(pods, tmp_path, 4)
        ask_to_end(pods[1])
        ended = finish(pods, timeout=LIMIT)
    assert all(code != 0 for code, _ in ended), ended
    assert "Traceback" not in ended[1][1]
