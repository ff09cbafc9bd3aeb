"""A pool: the processes of the ranks of one backend, which run one test after the other.

Importing torch takes longer than most tests, so the processes are kept as long as tests pass.  After anything else they
are killed and new ones are started: a failure costs its pool and nothing more.  This process imports neither torch nor
asyncpar.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from scripts.torch_conformance.messages import Play, Ready, Report
from scripts.torch_conformance.outcome import Outcome, Status

_ROOT = Path(__file__).resolve().parents[2]
_GRACE = 5.0
"""Seconds for the other ranks to say how they fared, once one has failed; and for stacks to be written."""

_START_LIMIT = 300.0
_EXIT_LIMIT = 30.0
_STACK_LINES = 60


class PoolFailedError(Exception):
    """The processes did not come up; the message has the end of what they wrote."""


@dataclass(frozen=True, slots=True)
class _Rank:
    process: subprocess.Popen[bytes]
    pipe: Connection
    log: Path

    def tail(self, lines: int = _STACK_LINES) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])


@dataclass(slots=True, kw_only=True)
class Pool:
    """Starts at the first use.  ``complaints`` are of processes that would not end when they should."""

    backend: str
    named: str
    """Whose tests they are, see ``rank.py``."""

    ranks: int
    logs: Path
    limit: float
    complaints: list[str] = field(default_factory=list)
    played: int = 0
    """Tests that the present processes have played."""

    _members: list[_Rank] = field(default_factory=list)
    _ready: Ready | None = None

    def start(self) -> Ready:
        """Return what the ranks say of themselves; starts them if they are not there.  Raises ``PoolFailedError``."""
        if self._members and self._ready is not None:
            return self._ready
        self.logs.mkdir(parents=True, exist_ok=True)
        self.played = 0
        self._members = [self._start_rank(rank) for rank in range(self.ranks)]
        answers = self._gather(_START_LIMIT)
        ready = [answer for answer in answers.values() if isinstance(answer, Ready)]
        if len(ready) < self.ranks:
            missing = next(rank for rank in range(self.ranks) if not isinstance(answers.get(rank), Ready))
            tail = self._members[missing].tail()
            self.kill()
            raise PoolFailedError(f"rank {missing} of {self.backend} did not start:\n{tail}")
        self._ready = ready[0]
        return ready[0]

    def play(self, test: str) -> Outcome:
        """Return how ``test`` ends; a test that takes longer than the limit is hung."""
        self.start()
        self.played += 1
        begin = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="torch-conformance-") as folder:
            for name in ("barrier", "test_dir", "init_dir"):
                (Path(folder) / name).mkdir()
            for member in self._members:
                member.pipe.send(Play(test=test, folder=folder))
            answers = self._gather(self.limit)
            status, detail = self._judge(answers)
            if status not in (Status.PASSED, Status.SKIPPED):
                self.kill()
        return Outcome(status=status, ranks=self.ranks, seconds=time.monotonic() - begin, detail=detail)

    def close(self) -> None:
        """Let the processes end by themselves; those that do not are complained of, and killed."""
        for member in self._members:
            member.pipe.close()
        deadline = time.monotonic() + _EXIT_LIMIT
        for rank, member in enumerate(self._members):
            try:
                status = member.process.wait(max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                self.complaints.append(f"{self.backend}: rank {rank} did not end within {_EXIT_LIMIT:.0f} s")
                continue
            if status != 0:
                self.complaints.append(f"{self.backend}: rank {rank} ended with {status}:\n{member.tail()}")
        self.kill()

    def kill(self) -> None:
        """End the processes, and what they have started, at once."""
        for member in self._members:
            _kill_session(member.process.pid)
            member.process.wait()
            member.pipe.close()
        self._members = []

    def interrupt(self) -> None:
        """From another thread: end the processes, so that the test that is being played fails."""
        for member in self._members:
            _kill_session(member.process.pid)

    def _start_rank(self, rank: int) -> _Rank:
        ours, theirs = Pipe()
        log = self.logs / f"{self.backend}-{self.ranks}-{id(self):x}-rank{rank}.log"
        command = [sys.executable, str(Path(__file__).with_name("rank.py"))]
        command += [f"--backend={self.backend}", f"--named={self.named}", f"--rank={rank}", f"--pipe={theirs.fileno()}"]
        environment = os.environ | {
            "WORLD_SIZE": str(self.ranks),
            "MASTER_ADDR": "127.0.0.1",
            "INIT_METHOD": "file://",
            "OMP_NUM_THREADS": "1",
            "PYTORCH_PRINT_REPRO_ON_FAILURE": "0",
        }
        with log.open("wb") as output:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                pass_fds=[theirs.fileno()],
                env=environment,
                cwd=_ROOT,
                start_new_session=True,
            )
        theirs.close()
        return _Rank(process, ours, log)

    def _gather(self, limit: float) -> dict[int, Any]:
        """Return one answer of each rank.  Missing are those that did not answer; None is from those that died."""
        answers: dict[int, Any] = {}
        waiting = {member.pipe: rank for rank, member in enumerate(self._members)}
        deadline = time.monotonic() + limit
        while waiting and (ready := wait(list(waiting), max(0.0, deadline - time.monotonic()))):
            for pipe in ready:
                assert isinstance(pipe, Connection)
                rank = waiting.pop(pipe)
                answers[rank] = answer = _receive(pipe)
                if answer is None or (isinstance(answer, Report) and answer.error):
                    deadline = min(deadline, time.monotonic() + _GRACE)
        return answers

    def _judge(self, answers: Mapping[int, Any]) -> tuple[Status, str]:
        """As torch's harness judges, but that a death is never a pass."""
        errors = {rank: self._error(rank, answer) for rank, answer in answers.items()}
        errors = {rank: error for rank, error in errors.items() if error}
        if errors:
            return Status.FAILED, "\n".join(f"rank {rank}: {error}" for rank, error in errors.items())
        missing = [rank for rank in range(self.ranks) if rank not in answers]
        if missing:
            return Status.HUNG, self._stacks(missing)
        first = answers[0]
        return (Status.SKIPPED, first.skipped) if first.skipped else (Status.PASSED, "")

    def _error(self, rank: int, answer: Report | None) -> str:
        if answer is not None:
            return answer.error
        status = self._members[rank].process.wait(_GRACE)
        return f"the process ended with {status}:\n{self._members[rank].tail()}"

    def _stacks(self, ranks: list[int]) -> str:
        for rank in ranks:
            self._members[rank].process.send_signal(signal.SIGUSR1)
        time.sleep(_GRACE)
        return "\n".join(f"rank {rank} hangs:\n{self._members[rank].tail()}" for rank in ranks)


def _receive(pipe: Connection) -> Any:
    """Return the next message, None if the rank has died."""
    try:
        return pipe.recv()
    except (EOFError, ConnectionError):
        return None


def _kill_session(pid: int) -> None:
    try:
        os.killpg(pid, signal.SIGKILL)
    except ProcessLookupError:
        return
