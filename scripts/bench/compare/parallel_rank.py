"""One rank of ``parallel.py``: hops of a pipeline, steps of ZeRO or of the demo model; rank 0 prints JSON lines."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

import asyncpar as ap
from scripts.bench.compare.parallel_hops import measure_hops
from scripts.bench.compare.parallel_train import measure_layouts
from scripts.bench.compare.parallel_zero import measure_stages
from scripts.bench.peers.model_rules import add_options, from_arguments


async def work(arguments: argparse.Namespace) -> None:
    """Be one rank; rank 0 prints."""
    async with ap.init() as node:
        match arguments.what:
            case "hops":
                await measure_hops(
                    node, sizes=arguments.sizes, micro_batches=arguments.micro_batches, repeats=arguments.steps
                )
            case "zero":
                await measure_stages(node, values=arguments.values, steps=arguments.steps)
            case _:
                await measure_layouts(node, arguments.layouts, from_arguments(arguments), arguments.micro_batches)
        await node.world.barrier()


def main() -> None:
    """Parse the options and run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("hops", "zero", "train"))
    parser.add_argument("--sizes", type=int, nargs="+", default=[4_000], help="bytes of activations")
    parser.add_argument("--micro-batches", type=int, default=8)
    parser.add_argument("--values", type=int, default=25_000_000, help="of the model of ZeRO")
    parser.add_argument("--layouts", nargs="+", default=["pp2"])
    add_options(parser)
    arguments = parser.parse_args()
    ap.run(lambda: work(arguments))


if __name__ == "__main__":
    main()
