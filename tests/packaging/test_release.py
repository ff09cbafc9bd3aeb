"""The files of a release agree: one version, commands that are there, and forms that the hosts' schemas accept."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from asyncpar import __version__
from tests.backends.extras import ROOT, need

WORKFLOWS = sorted(path.name for path in (ROOT / ".github" / "workflows").glob("*.yml"))
FORMS = sorted(path.name for path in (ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml") if path.name != "config.yml")


def check(schema: str, *paths: Path) -> None:
    """Fail with what the schema's checker says, unless all of ``paths`` are valid."""
    need("check_jsonschema", "pip install check-jsonschema")
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", f"vendor.{schema}", *map(str, paths)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def text(*names: str) -> str:
    return ROOT.joinpath(*names).read_text()


@pytest.mark.process
def test_forms_are_valid() -> None:
    github = ROOT / ".github"
    check("github-workflows", *(github / "workflows" / name for name in WORKFLOWS))
    check("github-issue-forms", *(github / "ISSUE_TEMPLATE" / name for name in FORMS))
    check("github-issue-config", github / "ISSUE_TEMPLATE" / "config.yml")
    check("dependabot", github / "dependabot.yml")
    check("citation-file-format", ROOT / "CITATION.cff")


@pytest.mark.parametrize("name", WORKFLOWS)
def test_workflows_run_what_is_there(name: str) -> None:
    commands = re.findall(r"- run: (\S+)", text(".github", "workflows", name))
    assert commands
    assert [command for command in commands if not (ROOT / command).is_file()] == []


def test_the_workflow_has_every_python_that_the_package_claims() -> None:
    claimed = [
        word.rpartition(" ")[2]
        for word in tomllib.loads(text("pyproject.toml"))["project"]["classifiers"]
        if re.fullmatch(r"Programming Language :: Python :: 3\.\d+", word)
    ]
    tested = re.search(r"python: \[(.*)\]", text(".github", "workflows", "tests.yml"))
    assert tested is not None
    assert re.findall(r'"([\d.]+)"', tested[1]) == claimed


def test_one_version_everywhere() -> None:
    assert re.findall(r"(?m)^version: (.*)$", text("CITATION.cff")) == [__version__]
    newest = re.findall(r"(?m)^## (\S+)", text("CHANGELOG.md"))[0]
    assert newest in (__version__, "Unreleased")  # scripts/release takes the version alone
    assert "version" in tomllib.loads(text("pyproject.toml"))["project"]["dynamic"]


def test_the_image_gets_what_the_wheel_is_built_from() -> None:
    project = tomllib.loads(text("pyproject.toml"))["project"]
    needed = {"pyproject.toml", "asyncpar", project["readme"], *project["license-files"]}
    copied = {word for line in re.findall(r"(?m)^COPY (?!--)(.*) \S+$", text("Dockerfile")) for word in line.split()}
    kept = set(re.findall(r"(?m)^!(.*)$", text(".dockerignore")))
    assert needed == copied == kept
