"""One rank of a pool: runs torch's own tests one after the other, as torch's harness does.

The tests are those of ``torch.testing._internal.distributed.distributed_test``; which of them a backend is to pass is
decided by torch when the module is imported, by the backend's name.  So the module is imported under the name of Gloo
(or MPI, for what only MPI can do), for every backend, and renamed afterwards: whatever is played for Gloo is played for
the other backend, too, against ``init_process_group`` with that backend's name.  Nor are assertions left out: torch
looks for a profiler's events only of backends that it lists, and the backend is put on those lists.  No test and no
assertion is changed.

Between two tests everything that the harness would have made anew with a process is made anew here: the folder, the
environment, torch's debug level, the process group.  Leaves as soon as the pool hangs up.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import importlib
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from scripts.torch_conformance.messages import Play, Ready, Report

BASELINE = "gloo"

_BY_NAME_ONLY = ("_test_accumulate_gradients_no_sync",)
"""Parts of tests that choose CPU tensors by the backend's name being Gloo's, and have no other choice for CPUs."""


def import_tests(backend: str, named: str) -> Any:
    """Return torch's module of tests, its decorators applied as for ``named``, its backend ``backend``."""
    os.environ["BACKEND"] = named
    if backend != BASELINE:
        importlib.import_module(f"{backend}.torch")
    module: Any = importlib.import_module("torch.testing._internal.distributed.distributed_test")
    os.environ["BACKEND"] = module.BACKEND = backend
    for profiled in (module.PROFILING_SUPPORTED_BACKENDS, module.SEND_RECV_PROFILING_SUPPORTED_BACKENDS):
        profiled.append(backend)
    return module


def derive_case(module: Any) -> Any:
    """Return the test class, as torch's ``test_distributed_spawn.py`` derives it."""

    class Conformance(module.TestDistBackend, module.DistributedTest._DistTestBase):
        pass

    for name in _BY_NAME_ONLY:
        setattr(Conformance, name, _named_as_baseline(module, getattr(Conformance, name)))
    return Conformance


def _named_as_baseline(module: Any, method: Callable[..., None]) -> Callable[..., None]:
    def call(*arguments: Any, **options: Any) -> None:
        backend, module.BACKEND = module.BACKEND, BASELINE
        try:
            method(*arguments, **options)
        finally:
            module.BACKEND = backend

    return call


def list_tests(case: Any) -> dict[str, str]:
    """Map the tests to why their decorators skip them."""
    tests = {}
    for name in sorted(name for name in dir(case) if name.startswith("test_")):
        method = getattr(case, name)
        tests[name] = (method.__unittest_skip_why__ or "skipped") if getattr(method, "__unittest_skip__", False) else ""
    return tests


@contextlib.contextmanager
def as_if_new(module: Any, folder: str) -> Iterator[str]:
    """Give one test what a new process would have; yields the name of the file by which the ranks meet."""
    before = dict(os.environ)
    os.environ |= {"TEMP_DIR": folder, "INIT_METHOD": f"file://{folder}/init_dir/shared_init_file"}
    module.INIT_METHOD = os.environ["INIT_METHOD"]
    module.Barrier.barrier_id = 0
    try:
        yield f"{folder}/meet"
    finally:
        if module.dist.is_initialized():
            module.dist.destroy_process_group()
        os.environ.clear()
        os.environ |= before
        module.dist.set_debug_level_from_env()


def play(module: Any, case: Any, rank: int, order: Play) -> Report:
    """Play one test by torch's harness, which ends a rank's process by an exit status for each way to end."""
    ours, theirs = Pipe()
    try:
        with as_if_new(module, order.folder) as meeting:
            case._run(rank, order.test, meeting, theirs)
    except SystemExit as end:
        return _interpret(module, case, end.code, ours)
    except BaseException:  # noqa: BLE001 - whatever a test raises is its result
        return Report(error=traceback.format_exc())
    finally:
        ours.close()
    return Report(error="torch's harness came back without an exit status")


def _interpret(module: Any, case: Any, status: Any, pipe: Connection) -> Report:
    if status == 0:
        return Report()
    if status == case.TEST_ERROR_EXIT_CODE:
        return Report(error=str(pipe.recv()) if pipe.poll() else "the test failed without a traceback")
    for skip in module.TEST_SKIPS.values():
        if skip.exit_code == status:
            return Report(skipped=skip.message)
    return Report(error=f"exit status {status}")


def main() -> None:
    """Serve the pool at the other end of the pipe."""
    parser = argparse.ArgumentParser(description="One rank of a pool; started by run.py.")
    parser.add_argument("--backend", required=True)
    parser.add_argument("--named", required=True, help="the backend whose tests they are")
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--pipe", type=int, required=True, help="an open file descriptor")
    arguments = parser.parse_args()
    pool = Connection(arguments.pipe)
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    module = import_tests(arguments.backend, arguments.named)
    case = derive_case(module)
    pool.send(Ready(tests=list_tests(case), versions=_versions(module, arguments.backend)))
    while True:
        try:
            order = pool.recv()
        except EOFError:
            return
        pool.send(play(module, case, arguments.rank, order))


def _versions(module: Any, backend: str) -> dict[str, str]:
    versions = {"torch": str(module.torch.__version__), "python": sys.version.split()[0]}
    if backend != BASELINE:
        versions[backend] = str(importlib.import_module(backend).__version__)
    return versions


if __name__ == "__main__":
    main()
