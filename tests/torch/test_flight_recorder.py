"""torch's flight recorder, which has nothing of this backend, and asyncpar's, in the same format."""

from __future__ import annotations

import json
import pickle
from typing import Any

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from asyncpar.observe.flight import torch_dumps
from asyncpar.observe.image import read_image
from tests.torch.worlds import on_ranks


def of_torch() -> tuple[dict[str, Any], dict[str, Any]]:
    """Return what torch's own recorder has, in both of its formats."""
    return json.loads(c10d._dump_fr_trace_json()), pickle.loads(c10d._dump_fr_trace())  # noqa: SLF001  # torch: there are no public names


def communicate(group: dist.ProcessGroup | None) -> None:
    """Do an operation of each kind: of all ranks, of one to all, and between two."""
    mine, x = dist.get_rank(), torch.ones(6, 2)
    dist.all_reduce(x, group=group)
    dist.broadcast(x, 1, group=group)
    dist.all_gather_single(torch.ones(12, 2), torch.ones(6, 2), group=group)
    if mine == 0:
        dist.send(x, 1, group=group)
    else:
        dist.recv(x, 0, group=group)
    dist.barrier(group=group)


@on_ranks(2, fresh=True)
def test_operations_are_in_the_recorder_of_asyncpar_and_not_in_that_of_torch() -> None:
    communicate(None)
    for found in of_torch():
        assert not found.get("entries")
    group: Any = dist.group.WORLD
    images: list[Any] = [None, None]
    dist.all_gather_object(images, group.node.links.recorder.snapshot())
    dump = torch_dumps({rank: read_image(image) for rank, image in enumerate(images)})[dist.get_rank()]
    done = {entry["profiling_name"].partition(":")[2] for entry in dump["entries"] if entry["state"] == "completed"}
    assert done >= {"all_reduce", "broadcast", "all_gather", "barrier"}
    assert [6, 2] in [size for entry in dump["entries"] for size in entry["input_sizes"]]
    communicate(dist.new_group(backend="gloo"))
    for found in of_torch():
        assert found["entries"]
