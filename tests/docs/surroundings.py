"""The programs around the pieces of programs in the documentation, so that tests can run those.

A piece is found by its page and its first line.  ``BLOCK`` is where it stands in the program; ``shorter`` replaces text
of it, so that a test does not train for a thousand steps.
"""

from __future__ import annotations

from dataclasses import dataclass, field

_MODEL = """
import asyncio

import numpy as np

import asyncpar as ap
from asyncpar.nn.optimizers import Adam, Optimizer
from asyncpar.nn.parameter import Initializer
from asyncpar.parallel.local.outer import OuterConfig
from tests.elasticity.pipeline_training import make_stages, squares
from tests.elasticity.training import Model
"""

_TORCH_WORLD = """
import os

import torch

from asyncpar.core.addresses import free_port  # other pieces may run at the same time

os.environ.update(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port("127.0.0.1")))
"""


@dataclass(frozen=True, slots=True)
class Surroundings:
    """The program around a piece, and what it needs."""

    program: str
    shorter: dict[str, str] = field(default_factory=dict)
    needs: str | None = None


_SERVED = '''
import os
import subprocess
import sys
from pathlib import Path

from grpc_tools import protoc

import asyncpar

protos = Path(asyncpar.__file__).parents[1] / "proto" / "asyncpar" / "v1"
assert protoc.main(["", f"-I{protos}", "--python_out=.", "--grpc_python_out=.", "actors.proto"]) == 0
Path("job.secret").touch(mode=0o600)
Path("job.secret").write_bytes(os.urandom(32))
serving = subprocess.Popen(
    [sys.executable, "-c", """
import asyncio
import asyncpar as ap
from tests.docs.actors import Counter

async def main():
    node = await ap.Node.start(serve="127.0.0.1:0")
    await node.spawn(Counter, name="counter")
    print(node.address, flush=True)
    await asyncio.to_thread(input)
    await node.stop()

ap.run(main)
"""],
    env={**os.environ, "ASYNCPAR_SECRET_FILE": "job.secret"}, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
)
address = serving.stdout.readline().strip()
BLOCK
print(serving.communicate("\\n", timeout=30)[0], end="")
assert json.loads(answer.value.json) == 3
'''

SURROUNDINGS = {
    ("docs/services.md", "import hashlib"): Surroundings(_SERVED, {'"127.0.0.1:29600"': "address"}),
    ("docs/dashboard.md", "ap.observe.report(loss=loss, lr=rate)  # every step, if you like: some microseconds"): (
        Surroundings("import asyncpar as ap\n\nloss, rate = 0.5, 1e-3\nBLOCK")
    ),
    ("docs/dashboard.md", "class TensorBoard:"): Surroundings("""
import sys
import types

from asyncpar.observe.summary import JobSummary
from asyncpar.testing.jobs import SyntheticJob

written = []


class SummaryWriter:
    def add_scalar(self, name, value, step):
        written.append(name)

    def close(self):
        written.append("closed")


sys.modules["torch.utils.tensorboard"] = types.SimpleNamespace(SummaryWriter=SummaryWriter)
for parent in ("torch", "torch.utils"):
    sys.modules.setdefault(parent, types.ModuleType(parent))
BLOCK
board = TensorBoard()
for job in SyntheticJob(4).summaries(3):
    board.take(job)
board.close("ended")
assert written[-1] == "closed" and len(written) > 1, written
"""),
    ("docs/devices.md", "async def average(comm):"): Surroundings("BLOCK", needs="a GPU"),
    ("docs/devices.md", "async def train(module, batches, runtime):"): Surroundings("BLOCK", needs="a GPU"),
    ("docs/elastic.md", "import asyncpar as ap\n\n\nasync def main():"): Surroundings(
        f"""{_MODEL}
from types import SimpleNamespace

whole = Model()
model, optimizer = SimpleNamespace(parameters=lambda: whole.parameters), whole.optimizer
batch, backward = (lambda number, portion: None), (lambda samples, rng: whole.backward(rng))
before = whole.first.value.copy()
BLOCK
asyncio.run(main())
assert not np.array_equal(before, whole.first.value)
""",
        {"until=1000": "until=3"},
    ),
    ("docs/elastic.md", "async def train(job, stages, parameters, optimizer, inputs, targets, loss):"): Surroundings(
        f"""{_MODEL}
BLOCK

async def main():
    stages = make_stages(2)
    parameters = [parameter for stage in stages for parameter in stage.parameters()]
    sample = lambda portion: np.random.default_rng(portion).standard_normal((5, 6)).astype(np.float32)
    async with ap.elastic(portions=4, seed=7) as job:
        optimizer = Optimizer(parameters, Adam())
        await train(job, stages, parameters, optimizer, sample, lambda portion: sample(portion)[:, :4] ** 2, squares)


asyncio.run(main())
""",
        {"until=1000": "until=3"},
    ),
    ("docs/elastic.md", "async def train(job: ap.ElasticJob, parameters, optimizer):"): Surroundings(
        f"""{_MODEL}
BLOCK

whole = Model()


def batch(number, step, portion):
    return np.random.default_rng([number, step, portion])


def backward(rng):
    gradients, loss = whole.backward(rng)
    for parameter in whole.parameters:
        parameter.grad = gradients[parameter.name]
    return loss


async def main():
    async with ap.elastic(portions=4, seed=7) as job:
        await train(job, whole.parameters, whole.optimizer)


asyncio.run(main())
""",
        {"until=100)": "until=2)"},
    ),
    ("docs/elastic.md", "import asyncpar as ap\n\n\nclass Scores(ap.ElasticActor):"): Surroundings(
        f"""{_MODEL}
BLOCK
asyncio.run(main())
""",
        {
            "        ...  # async for": """
        whole = Model()
        state = job.state(whole.parameters, whole.optimizer)
        async for step in job.steps(state, until=2):
            async with step:
                for portion in step.portions:
                    gradients, loss = whole.backward(step.rng(portion))
                    step.add(portion, gradients, loss=loss)
                await step.update(whole.optimizer, await step.reduce("mean"), learning_rate=1e-3)
                assert await scores.offer(float(step.number + 1)) == step.number + 1
        # async for"""
        },
    ),
    ("docs/elastic.md", "import torch\nimport torch.nn.functional as F"): Surroundings(
        "BLOCK\nassert len(job.state['losses']) == 5", {"until=200": "until=5"}, needs="torch"
    ),
    ("docs/engines.md", "import asyncpar as ap\nfrom distributed import Client"): Surroundings(
        "BLOCK", needs="a cluster"
    ),
    (
        "docs/launchers.md",
        "import asyncpar as ap\n\n\nasync def main() -> None:\n    job = await ap.slurm",
    ): Surroundings("BLOCK", needs="a cluster"),
    (
        "docs/engines.md",
        "import asyncpar as ap\n\n\nasync def main() -> None:\n    async with ap.connect",
    ): Surroundings(
        """
import asyncio
import os
import pathlib

import numpy as np

import asyncpar as ap

secret = pathlib.Path("job.secret")
secret.write_bytes(os.urandom(32))
secret.chmod(0o600)
os.environ["ASYNCPAR_SECRET_FILE"] = str(secret)
weights, loaded, address = np.ones(4, np.float32), [], ""


class Model(ap.Actor):
    @ap.endpoint
    async def load(self, weights, scale=1.0):
        loaded.append(float((scale * weights).sum()))

    @ap.endpoint
    async def steps(self):
        for step in range(3):
            yield step

BLOCK

async def serve():
    global address
    node = await ap.Node.start(serve="127.0.0.1:0")
    await node.spawn(Model, name="model")
    address = node.address
    await main()
    await node.stop()


asyncio.run(serve())
assert loaded == [2.0, 4.0], loaded
""",
        {'"host:4711"': "address", "rank=3": "rank=0"},
    ),
    ("docs/engines.md", "import asyncpar as ap\n\nlosses = ap.slurm"): Surroundings("BLOCK", needs="a cluster"),
    ("docs/engines.md", "import asyncpar as ap\n\nlosses = ap.mpi"): Surroundings("BLOCK", needs="a cluster"),
    ("docs/engines.md", "import asyncpar as ap\nimport ray"): Surroundings("BLOCK", needs="a cluster"),
    ("docs/engines.md", "import asyncpar as ap\nfrom my_training import train"): Surroundings(
        """
import pathlib

pathlib.Path("my_training.py").write_text('''
import asyncpar as ap


async def train(path):
    async with ap.init() as node:
        return node.rank


class Trainer(ap.Actor):
    def __init__(self, config):
        self.config = config

    @ap.endpoint
    async def step(self, batch):
        return batch
''')
if __name__ == "__main__":
    import asyncio

    from my_training import Trainer

    config, batch = {"width": 8}, 3
    BLOCK
    assert losses == [0, 1]
    asyncio.run(main())
""",
        {"ranks=4": "ranks=2", "ap.cluster(4)": "ap.cluster(2)", "dp=2, tp=2": "dp=2, tp=1", "\n": "\n    "},
    ),
    ("docs/training.md", "import numpy as np"): Surroundings("BLOCK", {"range(20)": "range(2)"}),
    ("docs/observing.md", 'with ap.span("load", batch=7):'): Surroundings(
        "import asyncpar as ap\n\nloader = iter([3])\nBLOCK\nassert batch == 3"
    ),
    ("docs/running.md", "@asynccontextmanager"): Surroundings("""
import asyncio
from contextlib import asynccontextmanager
from types import SimpleNamespace

import asyncpar as ap

FastAPI, Greeter = SimpleNamespace, object
added = []
add_GreeterServicer_to_server = lambda servicer, server: added.append(server)
start = ap.Node.start
ap.Node.start = lambda **options: start(serve="127.0.0.1:0", **options)  # a node alone has no server otherwise
BLOCK

async def main():
    app = SimpleNamespace(state=SimpleNamespace())
    async with lifespan(app):
        assert app.state.node.size == 1
    assert len(added) == 1


asyncio.run(main())
"""),
    ("docs/running.md", "async def reduce(comm, x):"): Surroundings("""
import asyncio

import numpy as np

import asyncpar as ap
BLOCK

async def main():
    async with ap.testing.local_world(3) as nodes:
        await nodes[2].stop()
        groups = await asyncio.gather(*(reduce(node.world, np.ones(3)) for node in nodes[:2]))
        assert [group.size for group in groups] == [2, 2]


ap.testing.run_virtual(main())
"""),
    ("docs/index.md", "ref = node.ref("): Surroundings(
        """
import asyncio

import asyncpar as ap
from tests.docs.actors import Counter


async def main():
    async with ap.testing.local_world(2) as nodes:
        node = nodes[0]
        await nodes[1].spawn(Counter, name="counter")
        BLOCK
        assert total == 3


asyncio.run(main())
""",
        {"\n": "\n        "},
    ),
    ("docs/index.md", "async with ap.testing.local_world(4) as nodes:"): Surroundings(
        """
import asyncio

import asyncpar as ap


async def main():
    BLOCK
    assert len(nodes) == 4


asyncio.run(main())
""",
        {"\n": "\n    "},
    ),
    ("docs/index.md", 'dist.init_process_group("asyncpar")'): Surroundings(
        _TORCH_WORLD
        + """
import torch.distributed as dist

BLOCK
assert dist.get_backend() == "asyncpar"
dist.destroy_process_group()
""",
        needs="torch",
    ),
    ("README.md", "import torch\nimport torch.distributed as dist"): Surroundings(
        _TORCH_WORLD + "BLOCK", needs="torch"
    ),
    ("docs/coming_from.md", "import torch\nimport torch.distributed as dist"): Surroundings(
        _TORCH_WORLD + "BLOCK", needs="torch"
    ),
    ("docs/jax.md", "import jax\nimport jax.numpy as jnp"): Surroundings("BLOCK", needs="jax"),
    ("docs/torch.md", "import torch.distributed as dist"): Surroundings(
        _TORCH_WORLD + "BLOCK\nassert dist.get_backend() == 'asyncpar'\ndist.destroy_process_group()", needs="torch"
    ),
    ("docs/torch.md", "import asyncpar.torch\n\nstate = asyncpar.torch.GradientHook"): Surroundings(
        f"""{_TORCH_WORLD}
import torch.distributed as dist

dist.init_process_group("asyncpar")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
BLOCK
dist.destroy_process_group()
""",
        {"...\n": "model(torch.ones(2, 4)).sum().backward()\n"},
        needs="torch",
    ),
    ("docs/torch.md", "import asyncpar.torch\n\nmodel = asyncpar.torch.DistributedDataParallel"): Surroundings(
        f"""{_TORCH_WORLD}
import torch.distributed as dist

dist.init_process_group("asyncpar")
module, inputs = torch.nn.Linear(4, 4), torch.ones(2, 4)
BLOCK
dist.destroy_process_group()
""",
        needs="torch",
    ),
    ("docs/torch.md", "from asyncpar.gradsync import TuningConfig"): Surroundings(
        f"""{_TORCH_WORLD}
import torch.distributed as dist
import asyncpar.torch

dist.init_process_group("asyncpar")
module = torch.nn.Linear(4, 4)
BLOCK
dist.destroy_process_group()
""",
        {"...\n": "model(torch.ones(2, 4)).sum().backward()\n"},
        needs="torch",
    ),
    ("docs/torch.md", "for part in model.modules():"): Surroundings(
        f"""{_TORCH_WORLD}
import torch.distributed as dist
import torch.distributed.fsdp

dist.init_process_group("asyncpar")
model = torch.distributed.fsdp.fully_shard(torch.nn.Linear(4, 4), mesh=dist.init_device_mesh("cpu", (1,)))
BLOCK
model(torch.ones(2, 4)).sum().backward()
dist.destroy_process_group()
""",
        needs="torch",
    ),
    ("docs/torch.md", 'model = asyncpar.torch.DistributedDataParallel(module, codec="int8")'): Surroundings(
        f"""{_TORCH_WORLD}
import torch.distributed as dist
import asyncpar.torch

dist.init_process_group("asyncpar")
module, path = torch.nn.Linear(4, 4), "feedback.pt"
BLOCK
dist.destroy_process_group()
""",
        {"...\n": "model(torch.ones(2, 4)).sum().backward()\n"},
        needs="torch",
    ),
    ("docs/torch.md", "import numpy as np\nimport torch\n"): Surroundings("BLOCK", needs="torch"),
    ("docs/torch.md", "from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook"): Surroundings(
        f"""{_TORCH_WORLD}
import torch.distributed as dist
import asyncpar.torch

dist.init_process_group("asyncpar")
model = asyncpar.torch.DistributedDataParallel(torch.nn.Linear(4, 4))
BLOCK
model(torch.ones(2, 4)).sum().backward()
dist.destroy_process_group()
""",
        needs="torch",
    ),
}
