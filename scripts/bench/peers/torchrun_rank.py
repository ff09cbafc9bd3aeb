"""A rank under torchrun that trains as ``elastic_rank.py`` does, from the last checkpoint on: the control of chaos.py.

It runs in the environment of Gloo and imports torch alone.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist


def main() -> None:
    """Train until ``--steps`` steps are done, and write a line for each."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--megabytes", type=float, required=True)
    parser.add_argument("--compute", type=float, required=True)
    parser.add_argument("--every", type=int, required=True)
    parser.add_argument("--folder", type=Path, required=True)
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    checkpoint = options.folder / "checkpoint.pt"
    weights, step = torch.zeros(int(options.megabytes * 2**18)), 0
    if checkpoint.exists():
        weights, step = torch.load(checkpoint)
    with (options.folder / f"rank{rank}.jsonl").open("a", buffering=1) as log:
        log.write(json.dumps({"kind": "start", "pid": os.getpid(), "time": time.monotonic(), "step": step}) + "\n")
        while step < options.steps:
            time.sleep(options.compute)
            gradient = torch.full_like(weights, float(rank + step))
            dist.all_reduce(gradient)
            weights -= 1e-3 * gradient
            step += 1
            if rank == 0 and step % options.every == 0:
                torch.save((weights, step), checkpoint.with_suffix(".new"))
                checkpoint.with_suffix(".new").replace(checkpoint)
            log.write(json.dumps({"kind": "step", "step": step, "time": time.monotonic()}) + "\n")
        total = weights.double().sum().item()
        log.write(json.dumps({"kind": "end", "sum": total.hex()}) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
