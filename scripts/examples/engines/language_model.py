"""The language model of ``train_lm.py`` as a function that any engine can run; the losses are the same on all."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from asyncpar.errors import UsageError
from asyncpar.train import make_compression, make_config, parse_arguments

RANKS = 4


async def train_language_model(arguments: Sequence[str]) -> list[float]:
    """Train as one rank of a world, by the options of ``train_lm.py``; return the losses."""
    losses: list[float] = (await train_rank(arguments)).losses
    return losses


async def train_rank(arguments: Sequence[str]) -> Any:
    """Train as one rank of a world, by the options of ``train_lm.py``; return its ``Run``."""
    train_lm = find_script()
    options = parse_arguments(list(arguments))
    return await train_lm.train(options, make_config(options), train_lm.read_texts(options))


def find_script() -> Any:
    """Return the module of ``train_lm.py``, which is beside this folder."""
    folder = str(Path(__file__).resolve().parents[1])
    if folder not in sys.path:
        sys.path.append(folder)
    import train_lm  # type: ignore[import-not-found]

    return train_lm


def check_options() -> None:
    """End the program in one line if the options of the command line are wrong."""
    try:
        options = parse_arguments()
        make_config(options)
        make_compression(options)
    except UsageError as error:
        raise find_script().refuse(error) from None


def run_on(engine: str, launch: Callable[[Sequence[str]], list[list[float]]]) -> None:
    """Train on an engine with the options of the command line, and print one line of JSON."""
    begun = time.perf_counter()
    by_rank = launch(sys.argv[1:])
    show_figures(engine, len(by_rank), by_rank[0], begun)


def show_figures(engine: str, ranks: int, losses: Sequence[float], begun: float) -> None:
    """Print one line of JSON; ``begun`` is by the performance counter."""
    figures = {"engine": engine, "ranks": ranks, "steps": len(losses), "first_loss": losses[0]}
    print(json.dumps({**figures, "last_loss": losses[-1], "seconds": round(time.perf_counter() - begun, 2)}))
