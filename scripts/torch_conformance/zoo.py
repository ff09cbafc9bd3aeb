"""Train a zoo of models under torch's DistributedDataParallel, over Gloo and asyncpar, and under asyncpar's own.

    python scripts/torch_conformance/zoo.py
    python scripts/torch_conformance/zoo.py --only "batch norm" GPT-2 --verbose

Needs torch, and transformers for the models of that library, without which they are left out.  Nothing is downloaded:
models are tiny and random.  Each is trained for a few steps on two ranks by each of three ways; a way *trains* a model
if all ranks end, with finite losses and the same parameters.  Exit status: 0 if all three ways train the same models,
and losses, gradients and parameters are those of torch's class over Gloo, up to the rounding of its sums.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import json
import math
import os
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import get_context
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from scripts.torch_conformance.zoo_torch import CASES, Case, square

WAYS = ("gloo", "asyncpar", "own")
"""torch's class over two backends, and asyncpar's class."""

STEPS = 4
TOLERANCE = 1e-5
LIMIT_SECONDS = 120.0
GRACE_SECONDS = 15.0
"""Seconds that the other rank has after one has failed."""


@dataclass(frozen=True, kw_only=True)
class Found:
    """What training has come to on all ranks: an error, or numbers."""

    error: str = ""
    numbers: tuple[float, ...] = ()
    digest: str = ""
    """Of the bits of all gradients and parameters."""

    @property
    def trains(self) -> bool:
        return not self.error


def cases() -> dict[str, Case]:
    """Return all models that can be built here."""
    if importlib.util.find_spec("transformers") is None:
        return CASES
    from scripts.torch_conformance import zoo_transformers

    return CASES | zoo_transformers.CASES


def train(case: Case, way: str) -> Found:
    """Train on this rank."""
    wrap: Callable[..., Any] = DistributedDataParallel
    if way == "own":
        from asyncpar.torch import DistributedDataParallel as OwnReplicas

        wrap = OwnReplicas
    torch.manual_seed(0)
    batches = torch.Generator().manual_seed(dist.get_rank())
    module = case.make()
    if any(isinstance(each, torch.nn.parameter.UninitializedParameter) for each in module.parameters()):
        module(case.batch(torch.Generator().manual_seed(9)))
    model = wrap(module, **case.settings)
    optimizer = case.optimizer([each for each in model.parameters() if each.requires_grad], lr=0.01)
    digest, numbers = hashlib.sha256(), []
    torch.manual_seed(1 + dist.get_rank())  # of dropout
    for _ in range(STEPS):
        optimizer.zero_grad()
        inputs = case.batch(batches)
        if case.train is not None:
            loss = case.train(model, inputs)
        else:
            loss = case.loss(model(inputs)) if case.loss is not square else square(model(inputs))
            loss.backward()
        gradients = [each.grad.to_dense() for each in model.parameters() if each.grad is not None]
        numbers += [loss.item(), *(each.abs().double().norm().item() for each in gradients)]
        _add(digest, gradients)
        optimizer.step()
    parameters = [*module.parameters()]
    numbers += [each.detach().abs().double().norm().item() for each in parameters]
    _add(digest, parameters)
    own = hashlib.sha256()
    _add(own, parameters)
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, own.hexdigest())
    if len({*every}) > 1:
        return Found(error="ranks have different parameters")
    if not all(map(math.isfinite, numbers)):
        return Found(error="losses or gradients are not finite")
    return Found(numbers=tuple(numbers), digest=digest.hexdigest())


def _add(digest: Any, tensors: list[Any]) -> None:
    for each in tensors:
        digest.update(each.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())


def rank(log: Path, names: Sequence[str], way: str, number: int, size: int, directory: str) -> None:
    """Be a rank: train one model after the other, until one fails, and write what it has found."""
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    warnings.simplefilter("ignore")
    if way != "gloo":
        import asyncpar.torch  # noqa: F401  # registers the backend, after the fork
    dist.init_process_group(
        "gloo" if way == "gloo" else "asyncpar",
        init_method=f"file://{directory}/store",
        rank=number,
        world_size=size,
        timeout=timedelta(seconds=LIMIT_SECONDS / 2),
    )
    known = cases()
    for name in names:
        try:
            found = train(known[name], way)
        except BaseException as error:  # noqa: BLE001  # which is the finding
            traceback.print_exc()
            found = Found(error=f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}")
        partial = Path(directory, f"partial-{number}")
        partial.write_text(json.dumps(found.__dict__))
        partial.rename(Path(directory, _place(number, names.index(name))))
        if not found.trains:
            sys.stdout.flush()
            os._exit(0)
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)


def _place(number: int, index: int) -> str:
    return f"found-{index}-{number}"


def run(names: Sequence[str], way: str, size: int, *, verbose: bool) -> Iterator[Found]:
    """Train models on ``size`` ranks, and yield what rank 0 has found of each, or the first error.

    Ranks end with an error, and others go on with the next model.
    """
    while names:
        with tempfile.TemporaryDirectory(prefix="zoo-") as directory:
            log = Path(directory, "log")
            ranks = [
                get_context("fork").Process(target=rank, args=(log, names, way, number, size, directory))
                for number in range(size)
            ]
            for each in ranks:
                each.start()
            for index in range(len(names)):
                found = _await(ranks, directory, index)
                yield next((each for each in found if not each.trains), found[0])
                if not all(each.trains for each in found):
                    break
            for each in ranks:
                each.join(GRACE_SECONDS if all(each.trains for each in found) else 0)
                each.kill()
                each.join()
            if verbose and not all(each.trains for each in found):
                print(log.read_text())
            names = names[index + 1 :]


def _await(ranks: Sequence[BaseProcess], directory: str, index: int) -> list[Found]:
    """Wait until all ranks have trained model ``index``, or until one has failed and the others had their time."""
    found: dict[int, Found] = {}
    end = time.monotonic() + LIMIT_SECONDS
    while len(found) < len(ranks) and time.monotonic() < end:
        time.sleep(0.02)
        for number, each in enumerate(ranks):
            is_alive = each.is_alive()
            place = Path(directory, _place(number, index))
            if number in found:
                continue
            if place.exists():
                found[number] = Found(**json.loads(place.read_text()))
            elif not is_alive:
                found[number] = Found(error=f"ended with status {each.exitcode}")
            else:
                continue
            if not found[number].trains:
                end = min(end, time.monotonic() + GRACE_SECONDS)
    return [found.get(number, Found(error="hung")) for number in range(len(ranks))]


def compare(reference: Found, other: Found) -> str:
    """Return how two trainings differ: not at all, by rounding, or in what."""
    if reference.digest == other.digest:
        return ""
    if len(reference.numbers) != len(other.numbers):
        return "other gradients"
    pairs = zip(reference.numbers, other.numbers, strict=True)
    most = max(abs(one - two) / max(abs(one), abs(two), 1e-6) for one, two in pairs)
    return "rounding" if most <= TOLERANCE else f"numbers by {most:.1e}"


def main() -> int:
    parser = argparse.ArgumentParser(description="Train a zoo of models under three kinds of DistributedDataParallel.")
    parser.add_argument("--only", nargs="+")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--verbose", action="store_true", help="show what failed ranks print")
    options = parser.parse_args()
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    known = cases()
    names = options.only or [*known]
    counts = dict.fromkeys(WAYS, 0)
    odd, equal = [], 0
    ways = [run(names, way, options.ranks, verbose=options.verbose) for way in WAYS]
    for name, *results in zip(names, *ways, strict=True):
        found = dict(zip(WAYS, results, strict=True))
        for way, each in found.items():
            counts[way] += each.trains
        lines = [f"{way}: {each.error}" for way, each in found.items() if not each.trains]
        if found["own"].trains and found["gloo"].trains:
            difference = compare(found["gloo"], found["own"])
            equal += not difference
            if difference:
                lines.append(f"own differs from gloo: {difference}")
        if len({each.trains for each in found.values()}) > 1 or any("numbers" in line for line in lines):
            odd.append(name)
        print(name, *lines, sep="\n    ", flush=True)
    print(f"\n{len(names)} models")
    for way, count in counts.items():
        print(f"  {count} train under {'asyncpar.torch.DistributedDataParallel' if way == 'own' else f'torch, {way}'}")
    print(f"  {equal} have the same bits under torch, gloo and asyncpar.torch.DistributedDataParallel")
    print(*(f"  differs: {name}" for name in odd), sep="\n")
    return int(bool(odd))


if __name__ == "__main__":
    raise SystemExit(main())
