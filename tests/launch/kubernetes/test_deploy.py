"""The files under ``deploy/kustomize`` are what ``asyncpar k8s`` prints, and what kustomize makes of them."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner

from asyncpar.launch.cli import main
from tests.launch.kubernetes.deployed import BASES, FOLDER, built


def read(path: Path) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(path.read_text()))


@pytest.mark.parametrize("base", BASES)
def test_a_base_is_what_the_command_in_its_first_lines_prints(base: str) -> None:
    path = FOLDER / base / "job.yaml"
    command = path.read_text().splitlines()[1].removeprefix("#").split()
    assert command[:2] == ["asyncpar", "k8s"]
    result = CliRunner().invoke(main, command[1:])
    assert result.exit_code == 0, result.output
    assert read(path) == json.loads(result.stdout)["items"], f"{path}: make it anew with {shlex.join(command)}"
    assert read(path.with_name("kustomization.yaml"))[0]["resources"] == ["job.yaml"]


def test_every_folder_is_a_base_or_the_example() -> None:
    assert sorted(path.name for path in FOLDER.iterdir()) == sorted([*BASES, "example"])


@pytest.mark.parametrize("base", BASES)
def test_kustomize_builds_a_base_as_it_is(base: str) -> None:
    order = lambda one: str(one["kind"])  # noqa: E731
    assert sorted(built(base), key=order) == sorted(read(FOLDER / base / "job.yaml"), key=order)


def test_the_example_has_as_many_pods_as_its_launchers_wait_for() -> None:
    [jobset] = built("example")
    job = jobset["spec"]["replicatedJobs"][0]["template"]["spec"]
    [container] = job["template"]["spec"]["containers"]
    nodes = container["command"][container["command"].index("--nnodes") + 1]
    assert [str(job["completions"]), str(job["parallelism"])] == [nodes, nodes] == ["4", "4"]
    assert container["image"] == "registry.example.org/physics/train:3"
    assert container["args"][0] == "train_lm.py"
    mounted = {mount["name"] for mount in container["volumeMounts"]}
    assert mounted == {volume["name"] for volume in job["template"]["spec"]["volumes"]} == {"secret", "own", "data"}
