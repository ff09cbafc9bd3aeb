"""Dumps in the format of torch's flight recorder, and folders of dumps."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import pickle
import subprocess
import sys
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from asyncpar.errors import UsageError
from asyncpar.node import Node
from asyncpar.observe.dump_folder import explain_dumps, read_dumps, write_dumps, write_torch_dumps
from asyncpar.observe.explain import HangCause, RankFacts
from asyncpar.observe.flight import torch_dumps
from asyncpar.observe.image import RankImage, read_image
from asyncpar.testing.loop import run_virtual
from asyncpar.testing.world import local_world
from tests.observe.planted import CULPRIT, PLANTED, absent
from tests.soak import first

TORCH = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed")

Program = Callable[[Node], Awaitable[object]]


async def everything(node: Node) -> None:
    world, x = node.world, np.zeros((6, 2), np.float32)
    await world.all_reduce(x)
    await world.broadcast(x, root=1)
    await world.all_gather(x)
    await world.all_gather_v(x[: node.rank])
    await world.reduce(x, root=2)
    await world.reduce_scatter(np.zeros((8, 3)))
    await world.reduce_scatter(np.zeros((7, 3)))
    await world.gather(x, root=1)
    await world.scatter(np.zeros((4, 5)) if node.rank == 0 else None, out=np.zeros(5))
    await world.all_to_all(np.zeros((4, 2)))
    await world.all_reduce_many([x, np.zeros(3)])
    await world.broadcast_object({"a": 1} if node.rank == 0 else None)
    await world.all_gather_object(node.rank)
    await asyncio.gather(*(world.all_reduce(np.zeros(3), key=key) for key in ("ab", "ba")[:: 1 - 2 * (node.rank % 2)]))
    half = await world.split(node.rank % 2)
    assert half is not None
    for _ in range(3):
        await half.all_reduce(x)
    after, before = (node.rank + 1) % 4, (node.rank - 1) % 4
    for tag in (0, 3, 0):
        await asyncio.gather(world.recv(before, tag=tag), world.send(np.zeros(9), after, tag=tag))
        await asyncio.gather(world.send(np.zeros(tag + 1), before, tag=tag), world.recv(after, tag=tag))
    await world.barrier()


async def overflow(node: Node) -> None:
    for number in range(1800):  # more than 4096 records on rank 1, with spans and barriers
        await node.world.all_reduce(np.zeros(2))
        if node.rank == 1:
            with node.span("more records than others have"):
                pass
        if number % 3 == 0:
            await node.world.barrier(key="named")


async def images_after(program: Program, seconds: float = 3.0) -> dict[int, RankImage]:
    """Run ``program`` on four ranks to its end, or for so long, and return the images."""
    async with local_world(4) as nodes:

        async def run(node: Node) -> None:
            with suppress(Exception):
                await program(node)

        tasks = [asyncio.create_task(run(node)) for node in nodes]
        await asyncio.wait(tasks, timeout=seconds)
        images = {node.rank: read_image(node.links.recorder.snapshot()) for node in nodes}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        return images


def analyzed(folder: Path, images: dict[int, RankImage]) -> str:
    """Return what torch's analyzer says about dumps of ``images``."""
    write_torch_dumps(folder, images)
    command = [sys.executable, "-m", "torch.distributed.flight_recorder.fr_trace", "-p", "torch_rank_", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ})
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


@pytest.mark.parametrize("program", [everything, overflow])
def test_entries_of_a_group_have_the_same_numbers_on_all_ranks(program: Program) -> None:
    dumps = torch_dumps(run_virtual(images_after(program)))
    assert {dump["version"] for dump in dumps.values()} == {"2.10"}
    by_group: dict[str, dict[int, list[Any]]] = {}
    for rank, dump in dumps.items():
        assert [entry["record_id"] for entry in dump["entries"]] == list(range(len(dump["entries"])))
        assert {entry["process_group"][0] for entry in dump["entries"]} == set(dump["pg_config"])
        for entry in dump["entries"]:
            by_group.setdefault(entry["process_group"][0], {}).setdefault(rank, []).append(entry["collective_seq_id"])
    for group, ranks in by_group.items():
        members = {
            tuple(json.loads(dump["pg_config"][group]["ranks"]))
            for dump in dumps.values()
            if group in dump["pg_config"]
        }
        assert len(members) == 1
        assert set(ranks) == set(next(iter(members)))
        numbers = [sorted(found) for found in ranks.values()]
        assert all(found == numbers[0] and len(set(found)) == len(found) for found in numbers)


@TORCH
@pytest.mark.process
@pytest.mark.timeout(120)
@pytest.mark.parametrize("program", first(1, [everything, overflow]))
def test_torchs_analyzer_finds_nothing_wrong_with_a_healthy_run(program: Program, tmp_path: Path) -> None:
    explained = analyzed(tmp_path, run_virtual(images_after(program)))
    for word in ("mismatch", "Culprit", "Not all ranks", "missing", "error"):
        assert word.lower() not in explained.lower(), explained


@TORCH
@pytest.mark.process
@pytest.mark.timeout(120)
@pytest.mark.parametrize("name", first(1, ["shape", "other operation", "dtype", "absent"]))
def test_torchs_analyzer_agrees_about_mismatches(name: str, tmp_path: Path) -> None:
    explained = analyzed(tmp_path, run_virtual(images_after(PLANTED[name].program)))
    words = {"absent": "Not all ranks", "dtype": "dtype", "shape": "SIZE_OR_SYNTAX", "other operation": "TYPE_MISMATCH"}
    assert words[name].lower().replace("_", " ") in explained.lower().replace("_", " "), explained


# -- folders -----------------------------------------------------------------------------------------------------------


async def raw_images(program: Program) -> dict[int, bytes]:
    async with local_world(4) as nodes:
        tasks = [asyncio.ensure_future(program(node)) for node in nodes]
        await asyncio.sleep(3.0)
        images = {node.rank: node.links.recorder.snapshot() for node in nodes}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        return images


def test_a_folder_of_dumps_is_explained(tmp_path: Path) -> None:
    facts = {CULPRIT: RankFacts(condition="stopped", detail="SIGSTOP")}
    write_dumps(tmp_path, run_virtual(raw_images(absent)), facts, for_torch=True)
    explained = explain_dumps(tmp_path)
    assert explained.startswith(f"rank {CULPRIT}: {HangCause.STOPPED}")
    assert "SIGSTOP" in explained
    with open(tmp_path / "torch_rank_0", "rb") as file:
        assert pickle.load(file)["version"] == "2.10"


def test_missing_and_torn_files_are_reported(tmp_path: Path) -> None:
    write_dumps(tmp_path, run_virtual(raw_images(absent)), {})
    (tmp_path / "rank_0.ring").write_bytes((tmp_path / "rank_0.ring").read_bytes()[:100])
    (tmp_path / "rank_3.ring").unlink()
    (tmp_path / "ranks.json").write_text("{")
    problems = read_dumps(tmp_path).problems
    assert [problem.partition(":")[0] for problem in problems] == ["rank_0.ring", "ranks.json", "rank 0", "rank 3"]
    assert "not read" in explain_dumps(tmp_path)


def test_a_folder_without_dumps_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no image of a rank"):
        read_dumps(tmp_path)
    with pytest.raises(UsageError, match="expected a folder"):
        read_dumps(tmp_path / "none")
