"""One rank of an elastic job: ``python -m tests.elasticity.rank NAME UNTIL RESULT``."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import asyncpar as ap
from asyncpar.elasticity.step import ElasticStep
from tests.elasticity.training import Result, train

HURRY = "hurry"
"""When there is a file of this name beside the results, steps take no longer than they must."""


def encode(result: Result) -> str:
    """Return everything that must be equal, as text."""
    losses = [loss.hex() for loss in result.losses]
    return json.dumps(
        [result.parameters.hex(), result.digest.hex(), losses, [draw.hex() for draw in result.draws], result.is_drained]
    )


def main() -> None:
    """Train, and write what comes out."""
    name, until, path = sys.argv[1:]
    progress, hurry = Path(f"{path}.progress"), Path(path).parent / HURRY

    def on_step(place: str, step: ElasticStep) -> None:
        if place == "computed":
            progress.write_text(str(step.number))
            if not step.is_replay and not hurry.exists():
                time.sleep(0.1)

    result = ap.run(train(None, name, until=int(until), on_step=on_step, pause=0.0))
    Path(path).write_text(encode(result))


if __name__ == "__main__":
    main()
