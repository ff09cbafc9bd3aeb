"""The dashboard of jobs that agents run shows the ranks of all hosts, and outlives agents that stop or die."""

from __future__ import annotations

import json
import re
import signal
import textwrap
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.launch.agents.agent_groups import TRAINING, AgentGroup, eventually
from tests.launch.agents.agent_pages import SHOWN, SPEAKING, hosts_of, see, shows_both, spoken, url_of
from tests.launch.test_launch_dashboard import ask
from tests.soak import first

pytestmark = [pytest.mark.process, pytest.mark.timeout(240)]

FOREVER = "1000000"
ELASTIC = ("--elastic", "ranks", "--last-call", "60")


@pytest.fixture
def group(tmp_path: Path) -> Iterator[AgentGroup]:
    made = AgentGroup(tmp_path)
    yield made
    made.close()


@pytest.mark.soak
def test_the_launcher_and_an_agent_show_what_runs_on_all_hosts(group: AgentGroup) -> None:
    group.start("one", *SHOWN, "--metrics=127.0.0.1:0")
    eventually(lambda: group.host("one") is not None, "the agent")
    group.start("two")
    eventually(lambda: group.host("two") is not None, "the other agent")
    of_agent = url_of(group, "one")
    found = re.search(r"metrics are at (http://\S+)", group.output("one"))
    assert found is not None
    assert see(of_agent, lambda one: True, "a page without a job")["sentence"] == "No rank has started yet."

    logs = group.folder / "logs"
    options = ("--nnodes", "2:2", *ELASTIC, *SHOWN, "--log-dir", str(logs))
    launcher = group.launch(SPEAKING + textwrap.dedent(TRAINING), FOREVER, options=options)
    of_launcher = url_of(group, "launch")
    for url in (of_launcher, of_agent):
        picture = see(url, shows_both, "both hosts on the page")
        eventually(lambda url=url: spoken(url) == 2, "the output of both hosts")  # type: ignore[misc]
    assert picture["phase"] == "running"
    assert (picture["job"], picture["command"].split()[0]) == ("job.py", str(group.folder / "job.py"))
    flight = ask(of_launcher, "flight")
    assert (flight["ranks"], flight["problems"]) == (2, [])
    assert "spoken by a rank" in [line["text"] for line in ask(of_launcher, "output?ranks=1")]
    with urllib.request.urlopen(found[1]) as answer:
        metrics = answer.read().decode()
    assert 'asyncpar_up{host="one"' in metrics
    assert 'host="two"' not in metrics

    launcher.terminate()
    ended = see(of_launcher, lambda one: bool(one["ended"]), "the end")
    assert ended["ended"].startswith("The job has ended with exit code 143.")
    assert launcher.wait(timeout=60) == 143
    document = json.loads((logs / "run.json").read_text())
    assert set(hosts_of(document["picture"]).values()) == {"one", "two"}


@pytest.mark.soak
def test_an_agent_that_is_stopped_is_an_alarm_until_it_answers_again(group: AgentGroup) -> None:
    group.start_all("one", "two")
    launcher = group.launch(TRAINING, FOREVER, options=("--nnodes", "2:2", *ELASTIC, *SHOWN))
    url = url_of(group, "launch")
    see(url, shows_both, "both hosts on the page")
    group.agents["two"].send_signal(signal.SIGSTOP)
    silent = re.compile(r"The agent of rank \d on two \(127\.0\.0\.1:\d+\) does not answer; look on that host")
    see(url, lambda one: any(silent.match(alarm) for alarm in one["alarms"]), "the silent agent's name")
    group.agents["two"].send_signal(signal.SIGCONT)
    see(url, lambda one: not one["alarms"] and shows_both(one), "the agent that answers again")
    launcher.terminate()
    assert launcher.wait(timeout=60) == 143


@pytest.mark.soak
def test_the_page_outlives_the_leader_of_the_group(group: AgentGroup) -> None:
    group.start_all("one", "two", "three")
    launcher = group.launch(TRAINING, FOREVER, options=("--nnodes", "1:3", *ELASTIC, *SHOWN))
    url = url_of(group, "launch")
    see(url, lambda one: one["world"] == 3 and len(one["ranks"]) == 3, "three hosts on the page")
    lost = group.leader()
    group.agents[lost].kill()
    others = {"one", "two", "three"} - {lost}
    after = see(url, lambda one: one["world"] == 2 and set(hosts_of(one).values()) == others, "the two that are left")
    assert not after["ended"]
    launcher.terminate()
    assert launcher.wait(timeout=60) == 143


@pytest.mark.soak
def test_launchers_that_run_a_job_as_agents_show_it(group: AgentGroup) -> None:
    address = f"127.0.0.1:{group.free_port()}"
    script = group.script(TRAINING)
    common = ("--nnodes", "2:2", *ELASTIC, "--rdzv-endpoint", address, "--secret-file", str(group.secret), *SHOWN)
    first = group.command("launch", "--host-name", "one", *common, script, FOREVER, log="first.log")
    url = url_of(group, "first")
    second = group.command("launch", "--host-name", "two", *common, script, FOREVER, log="second.log")
    see(url, shows_both, "both hosts on the page")
    assert "the dashboard is at" not in group.output("second")
    first.send_signal(signal.SIGINT)
    ended = see(url, lambda one: bool(one["ended"]), "the end")
    assert ended["ended"].startswith("The job has ended with exit code 130.")
    assert first.wait(timeout=60) == 130
    second.wait(timeout=60)


@pytest.mark.parametrize("is_submitted", first(1, [True, False]))
def test_a_page_that_cannot_be_served_is_reported_before_the_job_runs(group: AgentGroup, is_submitted: bool) -> None:
    endpoint = f"127.0.0.1:{group.free_port()}"
    if is_submitted:
        group.start_all("one")
        endpoint = group.addresses["one"]
    launcher = group.command(
        *("launch", "--nnodes", "1:1", "--elastic", "ranks", "--rdzv-endpoint", endpoint),
        *("--secret-file", str(group.secret), "--dashboard=192.0.2.1:80"),
        group.script("open('started', 'w').close()"),
        log="launch.log",
    )
    assert launcher.wait(timeout=60) == 2
    assert "--dashboard: 192.0.2.1:80 cannot be bound" in group.output("launch")
    assert "Traceback" not in group.output("launch")
    assert not (group.folder / "started").exists()


@pytest.mark.soak
def test_metrics_are_asked_of_agents_where_they_run_the_job(group: AgentGroup) -> None:
    group.start_all("one")
    launcher = group.launch("pass", options=("--nnodes", "1:1", "--elastic", "ranks", "--metrics"))
    assert launcher.wait(timeout=60) == 2
    assert "--metrics: agents run this job; give it to each `asyncpar agent`" in group.output("launch")
