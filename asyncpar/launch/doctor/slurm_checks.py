"""Checks of Slurm: its programs, controller, authentication and nodes; in a job, the place of this process."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

from asyncpar.core.addresses import resolve
from asyncpar.core.config.hostlist import expand_hosts
from asyncpar.core.config.rank_place import explain_batch_script, find_rank_place
from asyncpar.errors import UsageError
from asyncpar.launch.doctor.findings import Finding, fail, warn, well

_PROGRAMS: Final = ("sbatch", "scontrol", "sinfo", "srun")
_SECONDS: Final = 10.0
_LEAST_KILL_WAIT: Final = 5
_USABLE: Final = (
    "idle",
    "mix",
    "mixed",
    "alloc",
    "allocated",
    "comp",
    "completing",
    "resv",
    "reserved",
    "plnd",
    "planned",
)
_SHARED: Final = (
    "nfs",
    "lustre",
    "gpfs",
    "beegfs",
    "ceph",
    "fuse",
    "afs",
    "panfs",
    "cifs",
    "9p",
    "glusterfs",
    "orangefs",
)
_MOST_NAMES: Final = 16

Run = Callable[[tuple[str, ...]], tuple[int, str]]
"""Runs a command; returns its exit code and what it printed, both streams."""


def examine_slurm(environment: Mapping[str, str], *, mounts: str = "/proc/self/mounts") -> list[Finding]:
    """Return the findings on Slurm, within a minute."""
    path = environment.get("PATH", "")
    missing = [name for name in _PROGRAMS if shutil.which(name, path=path) is None]
    if missing:
        return [
            fail(
                "slurm",
                f"{', '.join(missing)}: not in PATH",
                "run this where jobs are submitted (a login node), or load the module of Slurm first",
            )
        ]

    def run(command: tuple[str, ...]) -> tuple[int, str]:
        return _run(command, environment)

    findings = [check_controller(run)]
    code, settings = run(("scontrol", "show", "config"))
    if code == 0:
        found = dict(line.split("=", 1) for line in settings.splitlines() if "=" in line)
        config = {name.strip(): value.strip() for name, value in found.items()}
        findings += [check_authentication(config, environment, run), check_kill_wait(config), check_nodes(run)]
    findings.append(check_meetings(environment, mounts))
    return findings + check_job(environment)


def check_controller(run: Run) -> Finding:
    """Check whether slurmctld answers."""
    code, output = run(("scontrol", "ping"))
    text = " ".join(output.split())
    if code == 0 and " UP" in text and "DOWN" not in text:
        return well("slurm controller", text)
    return fail("slurm controller", text or f"scontrol ping: exit code {code}", "look at slurmctld and its log there")


def check_authentication(config: Mapping[str, str], environment: Mapping[str, str], run: Run) -> Finding:
    """Check whether munge, which most clusters authenticate with, works here."""
    kind, name = config.get("AuthType", ""), "slurm authentication"
    if kind == "auth/none":
        return warn(name, f"{kind}: anyone can submit jobs as anyone", "use auth/munge or auth/slurm")
    if kind != "auth/munge":
        return well(name, kind)
    if shutil.which("munge", path=environment.get("PATH", "")) is None:
        return fail(
            name, "munge is not in PATH, and Slurm authenticates with it", "install munge, with the cluster's key"
        )
    code, output = run(("munge", "-n"))
    if code != 0:
        return fail(name, f"munge: {' '.join(output.split())}", "start munged, with the cluster's key")
    return well(name, "munge makes credentials")


def check_kill_wait(config: Mapping[str, str]) -> Finding:
    """Check how long ranks have between SIGTERM and SIGKILL."""
    text, name = config.get("KillWait", ""), "slurm KillWait"
    number = text.split()[0] if text else ""
    if not number.isdecimal():
        return well(name, text or "unknown")
    if int(number) < _LEAST_KILL_WAIT:
        advice = "write checkpoints before: asyncpar slurm --signal-before 120 warns ranks at the time limit"
        return warn(name, f"ranks have {number} s from SIGTERM to SIGKILL", advice)
    return well(name, f"ranks have {number} s from SIGTERM to SIGKILL")


def check_nodes(run: Run) -> Finding:
    """Count the nodes that take jobs."""
    code, output = run(("sinfo", "-h", "-o", "%D %t"))
    usable = useless = 0
    states: list[str] = []
    for line in output.splitlines() if code == 0 else ():
        count, _, state = line.partition(" ")
        if count.isdecimal() and state.strip("*~#!%$@^-+ ").lower() in _USABLE and "*" not in state:
            usable += int(count)
        elif count.isdecimal():
            useless += int(count)
            states.append(f"{count} {state}")
    if usable == 0:
        return fail("slurm nodes", f"none takes jobs ({', '.join(states) or output.strip()})", "sinfo -R says why")
    if useless:
        return warn("slurm nodes", f"{usable} take jobs, {', '.join(states)} do not", "sinfo -R says why")
    return well("slurm nodes", f"{usable} take jobs")


def check_meetings(environment: Mapping[str, str], mounts: str) -> Finding:
    """Check whether the directory in which ranks of several nodes meet is on a file system that they share."""
    named = environment.get("ASYNCPAR_MEETING_DIR")
    folder = Path(named or environment.get("HOME") or "/").resolve()
    name = "slurm meetings"
    if not os.access(folder, os.W_OK):
        return fail(name, f"{folder} is not writable", "name a directory of yours in ASYNCPAR_MEETING_DIR")
    kind = _file_system(folder, mounts)
    if kind is None:
        return well(name, f"{folder}, on a file system unknown here")
    if kind.startswith(_SHARED):
        return well(name, f"{folder} is on {kind}")
    return warn(
        name,
        f"{folder} is on {kind}, which other nodes may not see: ranks of several nodes would not find each other",
        "name a directory that all nodes see in ASYNCPAR_MEETING_DIR",
    )


def _file_system(folder: Path, mounts: str) -> str | None:
    try:
        lines = Path(mounts).read_text().splitlines()
    except OSError:
        return None
    found = [(fields[1], fields[2]) for line in lines if len(fields := line.split()) > 2]
    on = [(len(at), kind) for at, kind in found if folder == Path(at) or Path(at) in folder.parents]
    return max(on)[1] if on else None


def check_job(environment: Mapping[str, str]) -> list[Finding]:
    """Check the job of this process, if any: its place, and whether the names of its nodes resolve."""
    if not environment.get("SLURM_JOB_ID"):
        return []
    findings = []
    try:
        place = find_rank_place(environment)
        warning = explain_batch_script(environment)
        if warning is not None:
            findings.append(warn("slurm place", warning, "put srun before the program"))
        elif place is None:
            findings.append(well("slurm place", "a process alone"))
        else:
            findings.append(well("slurm place", f"rank {place.rank} of {place.world_size} on {place.host}"))
        hosts = expand_hosts(environment.get("SLURM_JOB_NODELIST", ""))
    except UsageError as error:
        return [
            *findings,
            fail("slurm place", str(error), "start the program with srun, with its variables as they are"),
        ]
    unknown = [name for name in hosts[:_MOST_NAMES] if not _is_known(name)]
    if unknown:
        advice = "have the nodes' names in DNS or /etc/hosts; agents (--elastic) need them"
        return [*findings, warn("slurm names", f"{', '.join(unknown)}: cannot be resolved here", advice)]
    return [*findings, well("slurm names", f"{len(hosts[:_MOST_NAMES])} nodes are known by name")]


def _is_known(name: str) -> bool:
    try:
        resolve(name)
    except OSError:
        return False
    return True


def _run(command: tuple[str, ...], environment: Mapping[str, str]) -> tuple[int, str]:
    try:
        done = subprocess.run(
            command,
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return 124, f"{command[0]} did not answer within {_SECONDS:g} s"
    return done.returncode, done.stdout
