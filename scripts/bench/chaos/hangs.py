"""Plant hangs in a world of four ranks in virtual time, and compare who is named, and why, with what is true.

    scripts/bench/run hangs           # with torch installed also what torch's analyzer says of the same dumps

The programs are those of ``tests/observe/planted.py``.  Whether a rank is stopped, dead or hung is known from its
agent, whose words are put in here.  The last line has the score, with torch also that of its analyzer: it is right if
it names the culprits, and calls the cause missing ranks (of an absent one) or the mismatch that it is.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import re
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from asyncpar.node import Node
from asyncpar.observe.dump_folder import write_torch_dumps
from asyncpar.observe.explain import HangCause, HangFinding, RankFacts, explain
from asyncpar.observe.image import RankImage, read_image
from asyncpar.testing.loop import run_virtual
from asyncpar.testing.world import local_world
from tests.observe.planted import CULPRIT, PLANTED, WORLD, Planted, absent

SEEN_BY_AGENTS = {
    "blocked loop": ("hung", HangCause.BLOCKED),
    "stopped": ("stopped", HangCause.STOPPED),
    "dead": ("ended", HangCause.DEAD),
}


TORCHS_WORDS = {
    HangCause.ABSENT: "missing ranks",
    HangCause.OTHER_OPERATION: "COLLECTIVE_TYPE_MISMATCH",
    HangCause.SHAPE: "SIZE_OR_SYNTAX_MISMATCH",
    HangCause.DTYPE: "COLLECTIVE_DTYPE_MISMATCH",
}
"""What torch's analyzer calls a cause, of those that it knows."""


async def hang(planted: Planted, condition: str) -> tuple[list[HangFinding], dict[int, RankImage]]:
    """Run a program until nothing goes on; return what is found, and the images."""

    async def run(node: Node) -> None:
        with suppress(Exception):
            await planted.program(node)

    async with local_world(WORLD) as nodes:
        tasks = [asyncio.create_task(run(node)) for node in nodes]
        await asyncio.sleep(3.0)
        images = {node.rank: read_image(node.links.recorder.snapshot()) for node in nodes}
        doing = "sleep" if planted.cause is HangCause.SLEEPING else ""
        found = explain(images, {CULPRIT: RankFacts(condition=condition, doing=doing)})
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        return found, images


def ask_torch(images: dict[int, RankImage]) -> str:
    """Return what torch's analyzer says, in a few words."""
    with tempfile.TemporaryDirectory() as folder:
        write_torch_dumps(Path(folder), images)
        command = [sys.executable, "-m", "torch.distributed.flight_recorder.fr_trace", "-p", "torch_rank_", folder]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    lines = (done.stdout + done.stderr).splitlines()
    told = [line.strip() for line in lines if line.startswith(("missing ranks", "error msg"))]
    return told[0].removeprefix("error msg: ")[:90] if told else "nothing wrong"


def judge(verdict: str, planted: Planted) -> tuple[bool, bool]:
    """Return whether a verdict of torch's analyzer names the culprits, and whether it names the cause, too."""
    found = re.match(r"missing ranks: \{([\d, ]+)\}|Culprit rank (\d+)", verdict)
    if found is None:
        return False, False
    has_culprits = {int(rank) for rank in (found[1] or found[2]).split(",")} == set(planted.culprits)
    return has_culprits, has_culprits and TORCHS_WORDS.get(planted.cause, "no such words") in verdict


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    has_torch, right = importlib.util.find_spec("torch") is not None, 0
    culprits_of_torch = right_of_torch = 0
    cases = {name: (planted, "well") for name, planted in PLANTED.items()}
    cases |= {name: (Planted(absent, cause), condition) for name, (condition, cause) in SEEN_BY_AGENTS.items()}
    for name, (planted, condition) in cases.items():
        found, images = run_virtual(hang(planted, condition))
        is_right = bool(found) and (found[0].cause, found[0].culprits) == (planted.cause, planted.culprits)
        right += is_right
        print(f"{name:16} {'right' if is_right else 'WRONG'}: {found[0].text if found else 'nothing was found'}")
        if has_torch:
            verdict = ask_torch(images)
            has_culprits, has_cause = judge(verdict, planted)
            culprits_of_torch, right_of_torch = culprits_of_torch + has_culprits, right_of_torch + has_cause
            print(f"{'':16} torch: {verdict}")
    score = f"culprit and cause: {right} of {len(cases)}"
    of_torch = f"; torch's analyzer {right_of_torch} of {len(cases)}, the culprit alone {culprits_of_torch}"
    print(score + (of_torch if has_torch else ""))


if __name__ == "__main__":
    main()
