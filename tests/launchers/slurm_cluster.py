"""A real cluster of Slurm on this machine: munge, one controller and three nodes, whose names are loopback addresses.

Jobs in the partition ``urgent`` preempt those of the usual one, which then have some seconds to end.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import psutil

PLACE = "ASYNCPAR_TEST_SLURM"
"""The variable with the directory where Slurm's packages are unpacked; see `scripts/test-slurm`."""

NODES = ("127.0.0.1", "127.0.0.2", "127.0.0.3")
CPUS = 4
GRACE = 20
"""Seconds that a job has to end in when it is preempted."""
_SETTINGS = """\
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={home}/munge/socket
CredType=cred/munge
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
PluginDir={plugins}
StateSaveLocation={home}/state
SlurmdSpoolDir={home}/spool-%n
SlurmdPidFile={home}/%n.pid
SlurmctldPidFile={home}/controller.pid
SlurmctldLogFile={home}/controller.log
SlurmdLogFile={home}/%n.log
MpiDefault=none
ReturnToService=2
KillWait=3
SlurmdTimeout=10
SlurmdParameters=config_overrides
SchedulerParameters=batch_sched_delay=0,sched_interval=1,bf_interval=1
NodeName=127.0.0.[1-3] NodeHostname={host} NodeAddr=127.0.0.1 Port=[{ports[1]}-{ports[3]}] CPUs={cpus} State=UNKNOWN
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP PriorityTier=1 GraceTime={grace}
PartitionName=urgent Nodes=ALL MaxTime=INFINITE State=UP PriorityTier=2
"""


def has_ended(pid: int) -> bool:
    """Has a process ended, whether or not its new parent has seen that?"""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


class SlurmCluster:
    """The daemons, and the commands that users give.  ``with SlurmCluster(path) as cluster``."""

    def __init__(self, home: Path) -> None:
        self.home = home
        root = Path(os.environ[PLACE])
        libraries = root / "usr" / "lib" / f"{os.uname().machine}-linux-gnu"
        self._sbin = root / "usr" / "sbin"
        self._plugins = libraries / "slurm-wlm"
        self.environment = {
            "PATH": os.pathsep.join(
                [str(home / "munge"), str(root / "usr" / "bin"), str(Path(sys.executable).parent), os.environ["PATH"]]
            ),
            "LD_LIBRARY_PATH": f"{libraries}:{self._plugins}",
            "SLURM_CONF": str(home / "slurm.conf"),
            "HOME": str(home),
            "TMPDIR": str(home),
        }
        self._daemons: subprocess.Popen[str] | None = None

    def __enter__(self) -> SlurmCluster:
        (self.home / "state").mkdir()
        settings = _SETTINGS.format(
            host=socket.gethostname(),
            user="root" if os.geteuid() == 0 else os.environ["USER"],
            ports=_free_ports(4),
            plugins=self._plugins,
            home=self.home,
            cpus=CPUS,
            grace=GRACE,
        )
        (self.home / "slurm.conf").write_text(settings)
        self._daemons = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("daemons.py"))],
            env=self.environment,
            stdin=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        try:
            self._start_munge()
            self._start("slurmctld-wlm", "-D")
            for node in NODES:
                (self.home / f"spool-{node}").mkdir()
                self._start("slurmd-wlm", "-D", "-N", node, "-d", str(self._sbin / "slurmstepd-wlm"))
            self.wait_idle()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        assert self._daemons is not None
        self._daemons.communicate()  # the end of its input ends all that they have started

    def _start(self, name: str, *arguments: str) -> None:
        assert self._daemons is not None
        assert self._daemons.stdin is not None
        log = str(self.home / f"{name}-{len(arguments)}.out")
        self._daemons.stdin.write(json.dumps([log, str(self._sbin / name), *arguments]) + "\n")
        self._daemons.stdin.flush()

    def _start_munge(self) -> None:
        """Start the daemon that authenticates users, and have ``munge`` ask it."""
        folder = self.home / "munge"
        folder.mkdir(mode=0o711)
        (folder / "key").write_bytes(os.urandom(64))
        (folder / "key").chmod(0o600)
        files = [f"--{name}-file={folder / name}" for name in ("key", "pid", "seed")]
        self._start("munged", "--foreground", "--force", f"--socket={folder}/socket", *files)
        (folder / "munge").write_text(f'#!/bin/sh\nexec {self._sbin.parent}/bin/munge --socket={folder}/socket "$@"\n')
        (folder / "munge").chmod(0o755)
        self.until((folder / "socket").exists, "munge's socket")

    def run(self, *command: str, status: int | None = 0, seconds: float = 60.0) -> str:
        """Run a command as a user does; its output, both streams.  ``status`` None: any."""
        process = self.begin(*command)
        try:
            output, _ = process.communicate(timeout=seconds)
        finally:
            process.kill()
        assert status in (None, process.returncode), f"{command}: {process.returncode}: {output}"
        return output

    def begin(self, *command: str) -> subprocess.Popen[str]:
        """Start a command."""
        return subprocess.Popen(
            command,
            env=self.environment,
            cwd=self.home,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def wait_idle(self) -> None:
        """Return when no node has a job."""
        self.until(lambda: self.run("sinfo", "-h", "-t", "idle", "-o", "%D").strip() == "3", "three idle nodes")

    def submit(self, *arguments: str) -> str:
        """Run `asyncpar slurm` and return the number of the job."""
        output = self.run(sys.executable, "-m", "asyncpar", "slurm", *arguments)
        assert output.startswith("asyncpar slurm: job "), output
        return output.split()[3]

    def output(self, job: str) -> str:
        """Return what a job has printed so far."""
        path = self.home / f"slurm-{job}.out"
        return path.read_text() if path.exists() else ""

    def finish(self, job: str) -> str:
        """Wait for the end of a job; return its state, and what it has printed."""
        shown = ""

        def is_over() -> bool:
            nonlocal shown
            shown = self.run("scontrol", "-o", "show", "job", job)
            return not any(f"JobState={state}" in shown for state in ("PENDING", "RUNNING", "COMPLETING"))

        self.until(is_over, f"the end of job {job}")
        return shown.partition("JobState=")[2].split()[0]

    def until(self, is_so: Callable[[], bool], what: str, seconds: float = 40.0) -> None:
        """Wait for something that Slurm or a job does."""
        end = time.monotonic() + seconds
        while not is_so():
            assert time.monotonic() < end, f"{what} did not come; " + "; ".join(
                f"{path.name}: {path.read_text()[-2000:]}" for path in self.home.glob("*.out")
            )
            time.sleep(0.1)  # real daemons have no other clock


def is_unpacked() -> bool:
    """Are Slurm's packages there?"""
    place = os.environ.get(PLACE)
    return place is not None and shutil.which("srun", path=f"{place}/usr/bin") is not None


def _free_ports(count: int) -> range:
    """Return ``count`` free ports in a row."""
    for first in range(21000, 31000, 10):
        with ExitStack() as stack:
            try:
                for port in range(first, first + count):
                    stack.enter_context(socket.create_server(("127.0.0.1", port)))
            except OSError:
                continue
        return range(first, first + count)
    raise AssertionError("no free ports")
