"""Measure how long survivors need from the loss of a rank to the first all-reduce of their next world.

    scripts/bench/run recovery --nproc 5 --rounds 9 [--transport tcp] [--signal STOP --timeout 1]

``--nproc`` processes of this host reduce 4 MB without a pause.  One is killed with SIGKILL (``--signal STOP``: stopped;
the others hold it for lost when it has not answered for ``--timeout`` seconds).  The others revoke their world, shrink
it to learn who is left, stop their nodes, and start the next generation in the same processes.  Printed are the median
and the largest figures of the last survivor, over all rounds: from the signal to the first error, from there to the end
of ``shrink``, of ``node.stop``, of ``Node.start`` and of the first all-reduce.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import statistics
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import numpy as np

import asyncpar as ap
from asyncpar._proto.asyncpar.v1 import membership_pb2_grpc
from asyncpar.core.config.environment import LaunchEnvironment
from asyncpar.net.membership.credentials import create_secret
from asyncpar.net.membership.service import RendezvousService
from asyncpar.net.transport.rpc import Credentials, RpcServer

_ELEMENTS = 1 << 20
_LOOK_SECONDS = 0.05
STEPS = ("error", "shrink", "stop", "start", "all_reduce")


async def survive(timeout: float) -> None:
    """Be one rank: reduce until a rank is lost, form the next world, and print when each step was over."""
    environment = LaunchEnvironment.from_mapping(os.environ)
    assert environment is not None
    node = await ap.Node.start(environment)
    comm, x = node.world, np.ones(_ELEMENTS, np.float32)
    comm.timeout = timeout
    await comm.all_reduce(x)
    print(json.dumps("ready"), flush=True)
    times = []
    try:
        while True:
            await comm.all_reduce(x)
    except ap.PeerError as error:
        times.append(time.time())
        comm.revoke(error)
    left = await comm.shrink()
    times.append(time.time())
    await node.stop()
    times.append(time.time())
    successor = replace(
        environment,
        rank=left.rank,
        local_rank=left.rank,
        world_size=left.size,
        local_world_size=left.size,
        generation=environment.generation + 1,
    )
    node = await ap.Node.start(successor)
    times.append(time.time())
    x[:] = 1
    await node.world.all_reduce(x)
    assert float(x[-1]) == left.size
    times.append(time.time())
    print(json.dumps(times), flush=True)
    await node.stop()


async def run_round(options: argparse.Namespace, directory: Path, victim: int) -> list[list[float]]:
    """Return, for each survivor, the seconds from the signal to the end of each step."""
    secret_file = directory / f"secret-{time.monotonic_ns()}"
    server = RpcServer(Credentials(create_secret(secret_file)))
    service = RendezvousService(job="recovery", world_size=options.nproc)
    membership_pb2_grpc.add_RendezvousServicer_to_server(service, server.server)  # type: ignore[no-untyped-call]
    await server.start()
    processes: list[asyncio.subprocess.Process] = []
    try:
        for rank in range(options.nproc):
            environment = LaunchEnvironment(
                rank=rank,
                local_rank=rank,
                world_size=options.nproc,
                local_world_size=options.nproc,
                group_rank=0,
                group_world_size=1,
                master_addr="127.0.0.1",
                master_port=1,
                rendezvous=server.address,
                secret_file=str(secret_file),
                job="recovery",
                generation=0,
                restart_count=0,
                host="here",
                host_id="here",
                bind="127.0.0.1",
                timeout=30.0,
                transport=options.transport,
            )
            command = [sys.executable, __file__, "--survive", "--timeout", str(options.timeout)]
            variables = {**os.environ, **environment.to_mapping(), "OMP_NUM_THREADS": "1"}
            process = await asyncio.create_subprocess_exec(*command, env=variables, stdout=asyncio.subprocess.PIPE)
            processes.append(process)
        for process in processes:
            await _next(process)
        await asyncio.sleep(2 * _LOOK_SECONDS)
        service.open(generation=1, world_size=options.nproc - 1)
        sent = time.time()
        processes[victim].send_signal(signal.SIGKILL if options.signal == "KILL" else signal.SIGSTOP)
        survivors = [process for rank, process in enumerate(processes) if rank != victim]
        return [[at - sent for at in await _next(process)] for process in survivors]
    finally:
        for process in processes:
            if process.returncode is None:
                process.kill()
            await process.wait()
        await server.stop(grace=0)


async def _next(process: asyncio.subprocess.Process) -> list[float]:
    assert process.stdout is not None
    line = await process.stdout.readline()
    assert line, "a rank has ended"
    value: list[float] = json.loads(line)
    return value


async def measure(options: argparse.Namespace) -> None:
    """Run all rounds and print the figures."""
    rounds = []
    with tempfile.TemporaryDirectory() as directory:
        for number in range(options.rounds):
            survivors = await run_round(options, Path(directory), number % options.nproc)
            rounds.append([max(column) for column in zip(*survivors, strict=True)])
            print(json.dumps([round(at, 4) for at in rounds[-1]]), file=sys.stderr)
    lane = options.transport or "any lane"
    print(f"{options.nproc} ranks, {lane}, SIG{options.signal}, last survivor, {len(rounds)} rounds")
    before = [0.0] * len(rounds)
    for step, column in zip(STEPS, zip(*rounds, strict=True), strict=True):
        took = [at - since for at, since in zip(column, before, strict=True)]
        print(f"{step:>12}: median {statistics.median(took):.3f} s, most {max(took):.3f} s")
        before = list(column)
    total = [row[-1] - row[0] for row in rounds]
    print(f"{'error to end':>12}: median {statistics.median(total):.3f} s, most {max(total):.3f} s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nproc", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--transport")
    parser.add_argument("--signal", choices=("KILL", "STOP"), default="KILL")
    parser.add_argument("--timeout", type=float, default=300.0)
    parser.add_argument("--survive", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    ap.run(survive(options.timeout)) if options.survive else asyncio.run(measure(options))


if __name__ == "__main__":
    main()
