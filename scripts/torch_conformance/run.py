"""Run torch's own distributed tests, those that are in its wheel, with Gloo and with asyncpar, and compare.

    python scripts/torch_conformance/run.py                          # both backends, every test
    python scripts/torch_conformance/run.py --backends asyncpar --only 'test_all_gather|test_ddp_join' --verbose
    python scripts/torch_conformance/run.py --resume                 # only what the file does not have yet
    python scripts/torch_conformance/run.py --compare                # only show what the file has

Needs torch and expecttest in the environment of the Python that runs it.  Every test of ``distributed_test`` that torch
plays for Gloo on CPUs is played for asyncpar, in 4 processes, and in 8 if it asks for more; those that need GPUs skip
themselves.  The processes play one test after the other (``--fresh``: new ones for each test); a failure counts only if
it repeats in new ones.  Each outcome is written to the file at once.  Exit status: 0 if asyncpar passes all that Gloo
passes or ``reasons.py`` says why not, else 1.
"""

from __future__ import annotations

import argparse
import re
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from rich.console import Console

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from scripts.torch_conformance.comparison import differences, markdown, stale_reasons
from scripts.torch_conformance.messages import Ready
from scripts.torch_conformance.outcome import Outcome, Record, Status
from scripts.torch_conformance.pool import Pool, PoolFailedError
from scripts.torch_conformance.reasons import REASONS

BASELINE = "gloo"
OURS = "asyncpar"
MPI = "mpi"
_COLOURS = {Status.PASSED: "green", Status.SKIPPED: "dim", Status.FAILED: "red", Status.HUNG: "bold red"}


@dataclass(slots=True, kw_only=True)
class Campaign:
    """One run of the script."""

    record: Record
    path: Path
    pattern: re.Pattern[str]
    resume: bool
    fresh: bool
    verbose: bool
    limit: float
    jobs: int
    console: Console = field(default_factory=Console)
    complaints: list[str] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _busy: list[Pool] = field(default_factory=list)
    _is_over: bool = False

    def play_all(self, backend: str, sizes: Sequence[int]) -> None:
        """Play the tests with the first of ``sizes``, those that want more ranks with the next, and so on.

        Gloo cannot do all that MPI can do: what torch plays on CPUs for MPI alone is played for the other backend, too.
        """
        known = set(self.record.of(backend)) if self.resume else set()
        for named in (BASELINE,) if backend == BASELINE else (BASELINE, MPI):
            for ranks in sizes:
                with self._pool(backend, named, ranks) as pool:
                    ready = pool.start()
                    self.record.versions |= ready.versions
                    tests = [test for test in ready.tests if self.pattern.search(test)]
                    if named == BASELINE and ranks == sizes[0]:
                        tests = [test for test in tests if test not in known]
                    else:
                        tests = [test for test in tests if self._is_left(backend, test, named, ranks)]
                    self._share_out(pool, self._settle_skipped(backend, ranks, ready, tests))

    def _is_left(self, backend: str, test: str, named: str, ranks: int) -> bool:
        """Has ``test`` been skipped so far for a reason that is none for tests of ``named`` with so many ranks?"""
        outcome = self.record.of(backend).get(test)
        if outcome is None:
            return False
        return (outcome.needs_other_ranks and outcome.ranks < ranks) or (outcome.needs_mpi and named == MPI)

    def _settle_skipped(self, backend: str, ranks: int, ready: Ready, tests: Sequence[str]) -> list[str]:
        """Note those that decorators skip; return the others."""
        for test in tests:
            if ready.tests[test]:
                self._note(backend, test, Outcome(status=Status.SKIPPED, ranks=ranks, detail=ready.tests[test]))
        return [test for test in tests if not ready.tests[test]]

    def _share_out(self, pool: Pool, tests: Sequence[str]) -> None:
        rest = iter(tests)
        self._is_over = False

        def play_rest(pool: Pool) -> None:
            self._busy.append(pool)
            while (test := self._next(rest)) is not None:
                outcome = self._play(pool, test)
                if not self._is_over:
                    self._note(pool.backend, test, outcome)
            self._busy.remove(pool)

        def play_with_own_pool() -> None:
            with self._pool(pool.backend, pool.named, pool.ranks) as own:
                play_rest(own)

        with ThreadPoolExecutor(self.jobs) as threads:
            shares = [threads.submit(play_rest, pool)]
            shares += [threads.submit(play_with_own_pool) for _ in range(self.jobs - 1)]
            try:
                for share in shares:
                    share.result()
            finally:
                self._stop()

    def _stop(self) -> None:
        """Play no more tests, and do not wait for those that are being played: they are none if all went well."""
        self._is_over = True
        for pool in [*self._busy]:
            pool.interrupt()

    def _next(self, rest: Iterator[str]) -> str | None:
        with self._lock:
            return None if self._is_over else next(rest, None)

    def _play(self, pool: Pool, test: str) -> Outcome:
        was_fresh = pool.played == 0
        outcome = first = pool.play(test)
        if first.status in (Status.FAILED, Status.HUNG) and not was_fresh and not self._is_over:
            second = pool.play(test)
            outcome = replace(second, first_detail=first.detail) if second.status is Status.PASSED else second
        if self.fresh:
            pool.close()
        return outcome

    def _note(self, backend: str, test: str, outcome: Outcome) -> None:
        with self._lock:
            self.record.add(backend, test, outcome)
            self.record.save(self.path)
            colour = _COLOURS[outcome.status]
            again = " (at the second attempt)" if outcome.first_detail else ""
            head = f"{backend} x{outcome.ranks} [{colour}]{outcome.status:8}[/] {outcome.seconds:6.1f} s  {test}{again}"
            self.console.print(head, highlight=False, soft_wrap=True)
            if outcome.status in (Status.FAILED, Status.HUNG):
                told = outcome.detail if self.verbose else outcome.last_line
                self.console.print(f"    {told}", style=colour, markup=False, highlight=False, soft_wrap=True)

    @contextmanager
    def _pool(self, backend: str, named: str, ranks: int) -> Iterator[Pool]:
        logs = self.path.parent / "torch-conformance-logs"
        pool = Pool(backend=backend, named=named, ranks=ranks, logs=logs, limit=self.limit)
        try:
            yield pool
            pool.close()
        finally:
            pool.kill()
            self.complaints += pool.complaints


def parse_arguments() -> argparse.Namespace:
    """Return the options; a wrong one ends the program with 2."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backends", default=f"{BASELINE},{OURS}", help=f"default: {BASELINE},{OURS}")
    parser.add_argument("--ranks", default="4,8", help="processes, and for tests that want more (default: 4,8)")
    parser.add_argument("--only", default="", help="only tests whose name has this regular expression in it")
    parser.add_argument("--resume", action="store_true", help="leave out what the file has")
    parser.add_argument("--compare", action="store_true", help="play nothing")
    parser.add_argument("--fresh", action="store_true", help="new processes for each test")
    parser.add_argument("--jobs", type=int, default=1, help="tests at once (default: 1)")
    parser.add_argument("--limit", type=float, default=180.0, help="seconds after which a test is hung (default: 180)")
    parser.add_argument("--verbose", action="store_true", help="show whole tracebacks")
    parser.add_argument("--out", type=Path, default=Path("out/torch-conformance.json"), help="the file of outcomes")
    arguments = parser.parse_args()
    try:
        arguments.ranks = [int(ranks) for ranks in arguments.ranks.split(",")]
        arguments.only = re.compile(arguments.only)
    except (ValueError, re.error) as error:
        parser.error(str(error))
    arguments.backends = arguments.backends.split(",")
    unknown = [backend for backend in arguments.backends if backend not in (BASELINE, OURS)]
    if unknown:
        parser.error(f"--backends: expected some of {BASELINE}, {OURS}, got {unknown[0]!r}")
    if min(*arguments.ranks, arguments.jobs) < 1 or not arguments.limit > 0:
        parser.error("--ranks, --jobs, --limit: expected positive numbers")
    return arguments


def show(record: Record, console: Console) -> bool:
    """Print the tables; return whether nothing is unexplained."""
    found = differences(record.of(BASELINE), record.of(OURS), REASONS)
    print(markdown((BASELINE, OURS), record.outcomes, found))
    repeated = [
        f"{backend}: {test}"
        for backend, outcomes in record.outcomes.items()
        for test, outcome in outcomes.items()
        if outcome.first_detail
    ]
    if repeated:
        console.print("passed at the second attempt only:", ", ".join(repeated), highlight=False, soft_wrap=True)
    stale = stale_reasons(record.of(OURS), REASONS)
    if stale:
        console.print("reasons.py explains what passes:", ", ".join(stale), highlight=False, soft_wrap=True)
    return not stale and all(one.reason for one in found)


def main() -> int:
    """Play, write, compare."""
    arguments = parse_arguments()
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    campaign = Campaign(
        record=Record.load(arguments.out),
        path=arguments.out,
        pattern=arguments.only,
        resume=arguments.resume,
        fresh=arguments.fresh,
        verbose=arguments.verbose,
        limit=arguments.limit,
        jobs=arguments.jobs,
    )
    try:
        for backend in () if arguments.compare else arguments.backends:
            campaign.play_all(backend, arguments.ranks)
    except PoolFailedError as error:
        campaign.console.print(str(error), style="red", markup=False, highlight=False, soft_wrap=True)
        return 1
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    explained = show(campaign.record, campaign.console)
    for complaint in campaign.complaints:
        campaign.console.print(complaint, style="red", markup=False, highlight=False, soft_wrap=True)
    return 0 if explained and not campaign.complaints else 1


if __name__ == "__main__":
    sys.exit(main())
