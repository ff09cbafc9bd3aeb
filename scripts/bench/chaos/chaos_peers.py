"""Train under the faults of chaos.py with torchrun and with torchft, which are its controls.

    scripts/bench/run chaos_peers torchrun --faults 8 --seed 1
    scripts/bench/run chaos_peers torchft --faults 8 --seed 1 --install

Every few steps one rank is killed (SIGKILL).  torchrun starts all ranks again, from the last checkpoint.  torchft goes
on with the replicas that are left; this script starts the killed one again.  The last line on stdout is one JSON
object: seconds from the kill to the next step that is new, and the steps that were done again.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from scripts.bench.environments import DEFAULT_ENVIRONMENTS, PEERS_DIRECTORY, install, is_installed, python_of

ENVIRONMENT = {"torchrun": "gloo", "torchft": "torchft"}
LONGEST_STALL = 90.0
LIGHTHOUSE = "127.0.0.1:29611"


class Job:
    """Processes of a peer, and what its ranks have written."""

    def __init__(self, options: argparse.Namespace, folder: Path) -> None:
        self._options = options
        self._folder = folder
        self._processes: list[subprocess.Popen[bytes]] = []
        self._python = python_of(ENVIRONMENT[options.peer], options.environments)

    def start(self) -> None:
        """Start all ranks, and what they need."""
        if self._options.peer == "torchrun":
            # without the variable ranks that start again find addresses of dead ones in the store that they share
            self._run(self._launcher(), {"GLOO_SOCKET_IFNAME": "lo", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"})
            return
        lighthouse = [str(self._python.with_name("torchft_lighthouse")), f"--bind={LIGHTHOUSE}", "--min_replicas=1"]
        self._run([*lighthouse, "--join_timeout_ms=1000", "--heartbeat_timeout_ms=1000", "--quorum_tick_ms=50"], {})
        for number in range(self._options.ranks):
            self.start_replica(f"rank{number}")

    def _launcher(self) -> list[str]:
        command = [str(self._python), "-m", "torch.distributed.run", "--nnodes=1", "--standalone"]
        command += [f"--nproc-per-node={self._options.ranks}", f"--max-restarts={self._options.faults + 5}"]
        return [*command, "--monitor-interval=0.1", "--local-addr=127.0.0.1", *self._rank("torchrun_rank.py")]

    def start_replica(self, name: str) -> None:
        """Start one rank of torchft."""
        settings = {"TORCHFT_LIGHTHOUSE": f"http://{LIGHTHOUSE}", "GLOO_SOCKET_IFNAME": "lo"}
        self._run([str(self._python), *self._rank("torchft_rank.py"), f"--name={name}"], settings)

    def _rank(self, program: str) -> list[str]:
        options = self._options
        steps = (options.faults + 2) * options.every
        settings = [f"--steps={steps}", f"--megabytes={options.megabytes}", f"--compute={options.compute}"]
        return [str(PEERS_DIRECTORY / program), *settings, f"--every={options.checkpoint}", f"--folder={self._folder}"]

    def _run(self, command: Sequence[str], settings: Mapping[str, str]) -> None:
        with (self._folder / "output.log").open("ab") as log:
            environment = {**os.environ, "OMP_NUM_THREADS": "1", **settings}
            self._processes.append(
                subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)
            )

    def end(self) -> None:
        """Kill what is left."""
        for process in self._processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        for line in self.lines():  # ranks of torchrun are in sessions of their own
            if line["kind"] == "start" and line["rank"] in self._unfinished():
                try:
                    os.kill(line["pid"], signal.SIGKILL)
                except ProcessLookupError:
                    continue

    def lines(self) -> list[dict[str, Any]]:
        """Return all lines of all ranks, with their ranks."""
        found = []
        for path in sorted(self._folder.glob("rank*.jsonl")):
            content = path.read_text().rpartition("\n")[0]
            found += [{"rank": path.stem, **json.loads(line)} for line in content.splitlines()]
        return found

    def _unfinished(self) -> set[str]:
        ended = {line["rank"] for line in self.lines() if line["kind"] == "end"}
        return {line["rank"] for line in self.lines()} - ended

    def position(self) -> int:
        """Return how many steps are done."""
        return max((line["step"] for line in self.lines() if line["kind"] == "step"), default=0)

    def wait_for(self, step: int) -> float:
        """Return the time when ``step`` was done first."""
        limit = time.monotonic() + LONGEST_STALL
        while True:
            times = [line["time"] for line in self.lines() if line["kind"] == "step" and line["step"] >= step]
            if times:
                return float(min(times))
            if time.monotonic() > limit:
                tail = (self._folder / "output.log").read_text(errors="replace")[-2000:]
                raise SystemExit(f"chaos_peers: step {step} did not come within {LONGEST_STALL:g} s\n{tail}")
            time.sleep(0.02)

    def wait_ended(self) -> None:
        """Return when a rank has come to its end, and the others have had time to."""
        limit = time.monotonic() + LONGEST_STALL
        while self._unfinished() and time.monotonic() < limit:
            time.sleep(0.1)

    def kill(self, dice: random.Random) -> str:
        """Kill one rank, and return which."""
        starts = sorted((line for line in self.lines() if line["kind"] == "start"), key=lambda line: line["time"])
        latest = {line["rank"]: line["pid"] for line in starts}
        victim = str(dice.choice(sorted(latest)))
        os.kill(latest[victim], signal.SIGKILL)
        return victim


def run(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Run the peer under faults, and return what was measured."""
    dice = random.Random(options.seed)
    job = Job(options, folder)
    with ExitStack() as stack:
        stack.callback(job.end)
        job.start()
        recoveries = []
        for number in range(options.faults):
            job.wait_for((number + 1) * options.every)
            reached, killed_at = job.position(), time.monotonic()
            victim = job.kill(dice)
            recoveries.append(job.wait_for(reached + 1) - killed_at)
            print(f"fault {number}: {recoveries[-1]:.2f} s", file=sys.stderr)
            if options.peer == "torchft":
                job.start_replica(victim)
        job.wait_for((options.faults + 2) * options.every)
        job.wait_ended()
        lines = job.lines()
    done = [(line["rank"], line["step"]) for line in lines if line["kind"] == "step"]
    return {
        "peer": options.peer,
        "faults": options.faults,
        "recovery_median": round(statistics.median(recoveries), 2),
        "recovery_max": round(max(recoveries), 2),
        "steps_done_again": max(len(steps) - len(set(steps)) for steps in _by_rank(done).values()),
        "sums": sorted({line["sum"] for line in lines if line["kind"] == "end"}),
    }


def _by_rank(done: Sequence[tuple[str, int]]) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for rank, step in done:
        found.setdefault(rank, []).append(step)
    return found


def main() -> None:
    """Run, and print what was measured."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("peer", choices=sorted(ENVIRONMENT))
    parser.add_argument("--faults", type=int, default=8)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--every", type=int, default=10, help="steps from one fault to the next")
    parser.add_argument("--checkpoint", type=int, default=4, help="steps from one checkpoint to the next (torchrun)")
    parser.add_argument("--megabytes", type=float, default=1.0)
    parser.add_argument("--compute", type=float, default=0.04, help="seconds that a step takes")
    parser.add_argument("--environments", type=Path, default=DEFAULT_ENVIRONMENTS)
    parser.add_argument("--install", action="store_true", help="install the environment of the peer first")
    options = parser.parse_args()
    name = ENVIRONMENT[options.peer]
    if options.faults < 1:
        parser.error("--faults: expected at least 1")
    if options.install and not is_installed(name, options.environments):
        install(name, options.environments)
    if not is_installed(name, options.environments):
        raise SystemExit(f"chaos_peers: {options.peer} is not installed; give --install")
    with tempfile.TemporaryDirectory(prefix="asyncpar-bench-") as folder:
        print(json.dumps(run(options, Path(folder))))


if __name__ == "__main__":
    main()
