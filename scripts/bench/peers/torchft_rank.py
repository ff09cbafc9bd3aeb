"""A replica under torchft that trains as ``elastic_rank.py`` does: the control of chaos.py.

It runs in the environment ``torchft`` and imports torch and torchft alone.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch.distributed import TCPStore
from torchft import Manager, ProcessGroupGloo


def main() -> None:
    """Train until ``--steps`` steps are committed, and write a line for each."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--megabytes", type=float, required=True)
    parser.add_argument("--compute", type=float, required=True)
    parser.add_argument("--every", type=int, required=True, help="ignored: replicas heal each other")
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--name", required=True)
    options = parser.parse_args()
    torch.set_num_threads(1)
    state = {"weights": torch.zeros(int(options.megabytes * 2**18))}

    def restore(given: dict[str, Any]) -> None:
        state["weights"].copy_(given["weights"])

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    manager: Any = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=5)),
        load_state_dict=restore,
        state_dict=lambda: dict(state),
        min_replica_size=1,
        rank=0,
        world_size=1,
        store_addr="127.0.0.1",
        store_port=store.port,
        replica_id=options.name,
        timeout=timedelta(seconds=10),
        hostname="127.0.0.1",
    )
    with (options.folder / f"{options.name}.jsonl").open("a", buffering=1) as log:
        log.write(json.dumps({"kind": "start", "pid": os.getpid(), "time": time.monotonic(), "step": 0}) + "\n")
        while manager.current_step() < options.steps:
            manager.start_quorum()
            time.sleep(options.compute)
            gradient = torch.full_like(state["weights"], float(manager.current_step()))
            manager.allreduce(gradient).wait()
            if manager.should_commit():
                state["weights"] -= 1e-3 * gradient
                line = {"kind": "step", "step": manager.current_step(), "time": time.monotonic()}
                log.write(json.dumps(line) + "\n")
        log.write(json.dumps({"kind": "end", "sum": state["weights"].double().sum().item().hex()}) + "\n")
    manager.shutdown(wait=False)


if __name__ == "__main__":
    main()
