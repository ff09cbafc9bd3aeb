"""Survivors get the error that names the lost rank, in every phase, also if they are too busy to notice it in time."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.soak import chosen

pytestmark = pytest.mark.process

PROGRAM = """
    import asyncio, importlib
    import numpy as np
    import asyncpar as ap

    phase, how, victim = sys.argv[1], sys.argv[2], 1
    asked = []

    def hold():
        '''Block the loop until this process was asked to end.'''
        before = signal.getsignal(signal.SIGTERM)
        signal.signal(signal.SIGTERM, lambda number, frame: (asked.append(number), before(number, frame)))
        register()
        while not asked:
            time.sleep(0.01)

    def hold_before(module, name):
        place = importlib.import_module(module)
        original = getattr(place, name)
        def held(*arguments, **named):
            hold()
            return original(*arguments, **named)
        setattr(place, name, held)

    async def end(*arguments, **named):
        while len(os.listdir(PIDS)) < int(os.environ["WORLD_SIZE"]) - 1:
            await asyncio.sleep(0.01)
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        raise RuntimeError("planted")

    PLACES = {
        "line": ("asyncpar.bootstrap", "open_agent_line"),
        "serving": ("asyncpar.bootstrap", "serve_links"),
        "joining": ("asyncpar.bootstrap", "join_world"),
        "arena": ("asyncpar.node", "form_arena"),
        "links": ("asyncpar.node", "ActorSystem"),
    }
    if phase in PLACES and rank != victim:
        hold_before(*PLACES[phase])

    elif phase == "arena":
        importlib.import_module("asyncpar.node").form_arena = end

    async def main():
        if rank == victim and phase in ("line", "serving", "joining"):
            await end()
        async with ap.init() as node:
            if rank == victim:
                await end()
            x = np.ones(1000, np.float32)
            if phase == "collective":
                asyncio.get_running_loop().call_later(0.01, hold)
            elif phase == "closing":
                register()
                stop = node.stop
                async def stop_slowly():
                    await stop()
                    await asyncio.sleep(3600)
                node.stop = stop_slowly
            await node.world.all_reduce(x, op="max")

    async def told():
        try:
            await main()
        except BaseException as error:
            if rank != victim:
                record = {"rank": rank, "kind": type(error).__name__, "blamed": getattr(error, "rank", None)}
                os.write(2, json.dumps(record).encode() + b"\\n")
            raise

    ap.run(told)
"""
RANKS = chosen(2, soak=3)
PHASES = ("line", "serving", "joining", "arena", "links", "collective", "closing")


ENDS = (*((phase, "kill") for phase in PHASES), ("serving", "raise"), ("collective", "raise"))


@pytest.mark.parametrize(("phase", "how"), chosen((("collective", "raise"),), soak=ENDS))
def test_survivors_that_are_busy_get_the_error_first(launcher: Any, phase: str, how: str) -> None:
    program = PROGRAM.replace("PIDS)", f"{str(launcher.pids_directory)!r})")
    done = launcher.run("--nproc-per-node", str(RANKS), launcher.script(program), phase, how)
    said = [line.split("] ", 1)[-1] for line in (done.stdout + done.stderr).splitlines()]
    records = sorted((json.loads(line) for line in said if line.startswith("{")), key=lambda record: record["rank"])
    assert records == [{"rank": rank, "kind": "PeerLost", "blamed": 1} for rank in range(RANKS) if rank != 1], (
        done.stderr
    )
    assert "rank 1 failed first" in done.stderr
