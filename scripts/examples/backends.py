"""The same program over any backend: gradients become their mean, in int8.

asyncpar launch --nproc-per-node 2 scripts/examples/backends.py
mpiexec -n 2 python scripts/examples/backends.py --backend mpi      # pip install "asyncpar[mpi]" mpich
"""

import argparse
import sys

import numpy as np

import asyncpar as ap
from asyncpar.errors import UsageError
from asyncpar.gradsync import GradientCompressionConfig, GradientSynchronizer
from asyncpar.nn import Parameter
from asyncpar.parallel import init_process_group


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", default="native", help="native, mpi or gloo (default: native)")
    try:
        runtime, group = await init_process_group(parser.parse_args().backend)
    except UsageError as error:  # there is no such backend, or it is not installed
        sys.exit(f"backends: {error}")
    async with runtime:
        compression = GradientCompressionConfig(codec="int8")
        synchronizer = GradientSynchronizer.data_parallel(group.communicator, compression=compression)
        parameter = Parameter("weight", np.zeros(100_000, np.float32))
        async with synchronizer.step([parameter]):
            parameter.grad += group.rank
        print(f"rank {group.rank} of {group.size}: the mean is {parameter.grad[0]:.4f}")
        await group.communicator.barrier()


ap.run(main)
