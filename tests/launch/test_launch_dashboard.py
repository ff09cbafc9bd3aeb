"""`asyncpar launch --dashboard`, `--metrics` and `--sink`, and `asyncpar report` afterwards."""

from __future__ import annotations

import json
import os
import re
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest

from asyncpar.launch.command_line import fill_bare
from tests.launch.conftest import LIMIT
from tests.launch.test_launch_hosts import start_pair
from tests.soak import first

pytestmark = pytest.mark.process
Launcher = Any  # the class lives in conftest.py

PROGRAM = """
    import asyncio
    import numpy as np
    import asyncpar as ap

    async def main():
        async with ap.init() as node:
            x = np.ones(1000, np.float32)
            step = 0
            while True:
                step += 1
                if rank == 1 and step == 20:
                    print("rank 1 sleeps", flush=True)
                    while not os.path.exists("slept"):
                        await asyncio.sleep(0.02)
                await node.world.all_reduce(x, op="max")
                ap.observe.report(loss=1.0 / step)
                await asyncio.sleep(0.01)
                go_on = np.array([os.path.exists("end")], np.int64)
                await node.world.all_reduce(go_on, op="max")
                if go_on[0]:
                    break

    asyncio.run(main())
"""


def urls(process: subprocess.Popen[str], *names: str) -> dict[str, str]:
    """Return the addresses that the launcher prints first."""
    found: dict[str, str] = {}
    assert process.stderr is not None
    while set(names) - set(found):
        line = process.stderr.readline()
        assert line, "it ended"
        if match := re.search(r"(dashboard|metrics)\D* at (http://\S+)", line):
            found[match[1]] = match[2]
    return found


def pictures(url: str) -> Iterator[dict[str, Any]]:
    address, _, token = url.partition("#token=")
    request = urllib.request.Request(f"{address}events", headers={"Authorization": f"Bearer {token}"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        for line in answer:
            if line.startswith(b"data: "):
                yield json.loads(line[6:])


def ask(url: str, path: str) -> Any:
    """Return what the page at ``url`` answers."""
    address, _, token = url.partition("#token=")
    request = urllib.request.Request(f"{address}{path}", headers={"Authorization": f"Bearer {token}"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.loads(answer.read())


def test_a_job_is_shown_while_it_runs_and_as_a_report_afterwards(launcher: Launcher) -> None:
    process = launcher.start(
        *("--nproc-per-node", "2", "--dashboard=127.0.0.1:0", "--metrics=127.0.0.1:0", "--log-dir", "logs"),
        launcher.script(PROGRAM),
    )
    found = urls(process, "dashboard", "metrics")
    has_waited, ended = False, ""
    for picture in pictures(found["dashboard"]):
        ended = picture["ended"]
        sentence = picture["sentence"]
        if "waits for rank 1" in sentence:
            has_waited = True
            (launcher.directory / "slept").touch()
        elif has_waited and "loss" in picture["values"] and not (launcher.directory / "end").exists():
            with urllib.request.urlopen(found["metrics"]) as answer:
                metrics = answer.read().decode()
            assert 'asyncpar_up{host="' in metrics
            assert "asyncpar_value_loss{" in metrics
            (launcher.directory / "end").touch()
    done = launcher.finish(process)

    assert has_waited
    assert done.returncode == 0, done.stderr
    assert ended == "The job has ended with exit code 0."
    made = launcher.command("report", "logs", "-o", "page.html")
    assert made.returncode == 0, made.stderr
    inside = (launcher.directory / "page.html").read_text().partition('id="document">')[2].partition("</script>")[0]
    document = json.loads(inside)
    assert document["picture"]["ended"] == ended
    assert {row["state"] for row in document["picture"]["ranks"]} == {1}  # ended
    assert "rank 1 sleeps" in [line["text"] for line in document["lines"]]


PIPELINE = """
    import asyncio
    import numpy as np
    import asyncpar as ap
    from asyncpar.hybrid import HybridConfig, ThreeDParallelismConfig, ThreeDParallelismCoordinator, TransformerModel
    from asyncpar.nn import TransformerConfig

    async def main():
        config = HybridConfig(parallelism=ThreeDParallelismConfig(pp_size=2, num_layers=2), micro_batches=4)
        model = TransformerModel(config=TransformerConfig(vocabulary=16, length=8, features=8, layers=2))
        tokens = [np.random.default_rng(number).integers(0, 16, (2, 9)) for number in range(4)]
        inputs, targets = [rows[:, :-1] for rows in tokens], [rows[:, 1:] for rows in tokens]
        async with ap.init() as node:
            async with await ThreeDParallelismCoordinator.create(config, model, node.world) as coordinator:
                while True:
                    await coordinator.train_step(inputs, targets, learning_rate=1e-3)
                    ending = np.array([os.path.exists("end")], np.int64)
                    await node.world.all_reduce(ending, op="max")
                    if ending[0]:
                        break

    asyncio.run(main())
"""


@pytest.mark.soak
def test_the_schedule_of_a_pipeline_is_shown_as_it_ran(launcher: Launcher) -> None:
    process = launcher.start(
        *("--nproc-per-node", "2", "--dashboard=127.0.0.1:0", "--log-dir", "logs"), launcher.script(PIPELINE)
    )
    url = urls(process, "dashboard")["dashboard"]
    for picture in pictures(url):
        if picture["schedule"] is not None and picture["schedule"]["run"] > 2:
            (launcher.directory / "end").touch()
    done = launcher.finish(process)

    assert done.returncode == 0, done.stderr
    run = json.loads((launcher.directory / "logs" / "run.json").read_text())["picture"]["schedule"]
    assert [(row["rank"], row["stages"]) for row in run["rows"]] == [(0, [0]), (1, [1])]
    for row in run["rows"]:
        done_of = [(run["kinds"][kind], batch) for kind, _, batch, _, _ in row["actions"]]
        assert sorted(done_of) == [(kind, batch) for kind in ("backward", "forward") for batch in range(4)]


SPEAKING = """
    print("spoken by", rank, flush=True)
    while not os.path.exists("end"):
        time.sleep(0.05)
"""


@pytest.mark.soak
def test_the_output_of_all_hosts_is_on_the_page(launcher: Launcher) -> None:
    leader, follower = start_pair(launcher, launcher.script(SPEAKING), first=("--dashboard=127.0.0.1:0",))
    url = urls(leader, "dashboard")["dashboard"]
    limit, found = time.monotonic() + LIMIT, set[str]()
    while found != {"spoken by 0", "spoken by 1"}:
        assert time.monotonic() < limit, found
        found = {line["text"] for line in ask(url, "lines")}
        time.sleep(0.1)
    assert ask(url, "output?ranks=1") == [{"rank": 1, "text": "spoken by 1", "error": False}]
    assert ask(url, "output?ranks=7") == [{"rank": 7, "text": "(the job has no such rank)", "error": True}]
    (launcher.directory / "end").touch()
    assert [launcher.finish(process).returncode for process in (leader, follower)] == [0, 0]


def test_a_failed_job_is_shown_as_failed(launcher: Launcher) -> None:
    done = launcher.run("--log-dir", "logs", launcher.script("sys.exit(3)"))

    assert done.returncode == 3
    document = json.loads((launcher.directory / "logs" / "run.json").read_text())
    assert document["picture"]["failed"] is True
    assert document["picture"]["ended"].startswith("The job has ended with exit code 3. rank 0")


SINK = """
import json, os

class ToFile:
    def take(self, job):
        with open("sink", "a") as file:
            file.write(json.dumps([job.job, len(job.ranks)]) + chr(10))

    def close(self, outcome):
        with open("sink", "a") as file:
            file.write(json.dumps(outcome) + chr(10))

class Broken(ToFile):
    def take(self, job):
        raise OSError(28, "No space left on device")
"""


def test_sinks_get_the_job_and_a_broken_one_does_not_disturb_it(launcher: Launcher) -> None:
    launcher.script(SINK, name="my_sinks.py")
    (launcher.directory / "my_sinks.py").write_text(SINK)
    process = launcher.start(
        *("--sink", "my_sinks:ToFile", "--sink", "my_sinks:Broken", "--rdzv-id", "mine"),
        launcher.script("while not os.path.exists('sink'): time.sleep(0.02)"),
        env={"PYTHONPATH": os.fspath(launcher.directory)},
    )
    done = launcher.finish(process)

    assert done.returncode == 0
    assert "sink my_sinks:Broken has failed and gets nothing more: OSError: [Errno 28]" in done.stderr
    first, *_, last = (launcher.directory / "sink").read_text().splitlines()
    assert json.loads(first)[0] == "mine"
    assert json.loads(last) == "The job has ended with exit code 0."


@pytest.mark.parametrize(
    ("arguments", "problem"),
    first(
        2,
        [
            (["--dashboard=here"], "--dashboard: expected ADDRESS:PORT, such as 127.0.0.1:8787, got 'here'"),
            (["--metrics=127.0.0.1"], "--metrics: expected ADDRESS:PORT"),
            (["--dashboard-names", "hub"], "--dashboard-names: expected with --dashboard"),
            (["--dashboard=192.0.2.1:80"], "--dashboard: 192.0.2.1:80 cannot be bound"),
            (["--metrics=192.0.2.1:80"], "--metrics: 192.0.2.1:80 cannot be bound"),
            (["--sink", "nothing"], "--sink: expected one of those installed"),
        ],
    ),
)
def test_what_cannot_be_served_is_reported_before_ranks_start(
    launcher: Launcher, arguments: list[str], problem: str
) -> None:
    done = launcher.run(*arguments, launcher.script("register()"))

    assert (done.returncode, launcher.registered()) == (2, [])
    assert problem in done.stderr
    assert "Traceback" not in done.stderr


def test_a_report_of_nothing_says_where_runs_are(launcher: Launcher) -> None:
    done = launcher.command("report", str(launcher.directory))

    assert done.returncode == 2
    assert "there is no such file; `asyncpar launch --log-dir DIR` writes DIR/run.json" in done.stderr


@pytest.mark.parametrize(
    ("given", "filled"),
    [
        ("--dashboard job.py --dashboard", "--dashboard=127.0.0.1:8787 job.py --dashboard"),
        ("--nproc-per-node 2 --dashboard=h:1 -m job", "--nproc-per-node 2 --dashboard=h:1 -m job"),
        ("-r 3 --metrics -- --metrics", "-r 3 --metrics=127.0.0.1:9464 -- --metrics"),
        ("-r3 -m --dashboard job", "-r3 -m --dashboard=127.0.0.1:8787 job"),
        ("--nproc_per_node 2 --dashboard", "--nproc_per_node 2 --dashboard=127.0.0.1:8787"),
        ("", ""),
    ],
)
def test_an_option_without_its_value_leaves_the_program_alone(given: str, filled: str) -> None:
    from asyncpar.launch.cli import launch

    assert fill_bare(launch.params, given.split()) == filled.split()
