"""An inference service whose weights a trainer pushes while it answers requests.

    asyncpar launch --nproc-per-node 2 scripts/examples/serve_weights.py --port 8000
    curl -s -X POST localhost:8000/predict -H 'content-type: application/json' -d '{"tokens": [17, 4711, 17]}'

Rank 0 trains a small classifier of bags of tokens and pushes its weights by ``broadcast``.  Every other rank is a
FastAPI service under uvicorn, on ports from ``--port`` on, with a node in the lifespan of the application.  Pushed
weights arrive in a standby buffer; when they are complete, the two buffers change places between two turns of the event
loop, so that every answer comes from one version, and says which.

SIGTERM and Ctrl-C end all of it in good order, with exit code 0.  It needs the packages of the extra ``serve``.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import signal
import socket
import sys
import time
from collections import deque
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

import asyncpar as ap

try:
    import uvicorn
    from fastapi import FastAPI, HTTPException
    from pydantic import BaseModel, Field
except ModuleNotFoundError as error:
    sys.exit(f'serve_weights: there is no {error.name}: pip install "asyncpar[serve]"')

Array = NDArray[np.float32]

CLASSES = 8
BAG = 16
"""Tokens of one training example."""

BATCH = 64
RATE = 2.0
PIECE = 1 << 17
"""Numbers that are broadcast at once: half a megabyte, which keeps the loop of a service for a fraction of a ms."""

PAUSE = 0.001
"""Seconds between two pieces.  A service answers requests meanwhile; 25 MB arrive in a tenth of a second."""

REMEMBERED_PUSHES = 10_000
MOST_VERSIONS = 1 << 24
"""Versions travel with the weights, as one more float32, which counts as far as this."""


@dataclass(frozen=True, slots=True)
class Shape:
    """How many tokens there are, and how wide their embeddings are."""

    rows: int
    width: int

    @property
    def count(self) -> int:
        """Numbers of a model: embeddings, head, and the version."""
        return self.rows * self.width + self.width * CLASSES + 1


class Model:
    """A classifier of bags of tokens: the mean of their embeddings, then a linear head.

    All of it, and its version, is one flat array, so that one broadcast carries it.
    """

    def __init__(self, shape: Shape, weights: Array) -> None:
        self.weights = weights
        end = shape.rows * shape.width
        self._table = weights[:end].reshape(shape.rows, shape.width)
        self._head = weights[end:-1].reshape(shape.width, CLASSES)

    @property
    def version(self) -> int:
        return int(self.weights[-1])

    def initialize(self, generator: np.random.Generator) -> None:
        """Make the weights of version 0."""
        self._table[:] = generator.normal(size=self._table.shape, scale=0.1)
        self._head[:] = generator.normal(size=self._head.shape, scale=0.1)
        self.weights[-1] = 0

    def scores(self, tokens: NDArray[np.int64]) -> Array:
        """Return a number for each class; shape (classes,), or (batch, classes) for (batch, bag)."""
        means: Array = self._table[tokens].mean(axis=-2)
        return means @ self._head

    def step(self, tokens: NDArray[np.int64], labels: NDArray[np.int64]) -> float:
        """Take one step of stochastic gradient descent; return the mean loss before it."""
        means: Array = self._table[tokens].mean(axis=1)
        logits = means @ self._head
        logits -= logits.max(axis=1, keepdims=True)
        chances = np.exp(logits)
        chances /= chances.sum(axis=1, keepdims=True)
        rows = np.arange(len(labels))
        loss = -float(np.log(chances[rows, labels]).mean())
        chances[rows, labels] -= 1.0
        chances /= len(labels)
        slopes = chances @ self._head.T / tokens.shape[1]
        self._head -= RATE * means.T @ chances
        np.subtract.at(self._table, tokens.ravel(), RATE * np.repeat(slopes, tokens.shape[1], axis=0))
        return loss


def pieces(weights: Array) -> list[Array]:
    """Return the parts in which weights travel: a service answers requests in between."""
    return [weights[start : start + PIECE] for start in range(0, len(weights), PIECE)]


# -- rank 0 ------------------------------------------------------------------------------------------------------------


def make_batch(shape: Shape, generator: np.random.Generator) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return bags of tokens, few of them frequent, and the class that most tokens of a bag are of."""
    tokens = (shape.rows * generator.random((BATCH, BAG)) ** 4).astype(np.int64)
    votes = np.stack([(tokens % CLASSES == each).sum(axis=1) for each in range(CLASSES)], axis=1)
    return tokens, votes.argmax(axis=1)


async def train_until(due: float, model: Model, shape: Shape, generator: np.random.Generator) -> float:
    """Train at least once and until ``due``, by ``time.monotonic``; return the last loss.

    The steps run in a thread, so that the loop stays free.
    """
    while True:
        loss = await asyncio.to_thread(lambda: model.step(*make_batch(shape, generator)))
        if time.monotonic() >= due:
            return loss


async def train(shape: Shape, every: float) -> None:
    """Train and push weights at intervals, until the program is stopped or a service has left."""
    node = await ap.Node.start()
    try:
        model = Model(shape, node.empty(shape.count))
        generator = np.random.default_rng(0)
        model.initialize(generator)
        for version in range(1, MOST_VERSIONS):
            due = time.monotonic() + every
            loss = await train_until(due, model, shape, generator)
            model.weights[-1] = version
            begin = time.monotonic()
            await push(node.world, model.weights)
            took = 1e3 * (time.monotonic() - begin)
            print(f"version {version}: loss {loss:.3f}, {model.weights.nbytes} bytes in {took:.1f} ms", flush=True)
    except (ap.PeerLost, ap.PeerCancelled) as error:
        print(f"training ends: {error}", flush=True)
    finally:
        await node.stop()


async def push(world: ap.Communicator, weights: Array) -> None:
    """Send the weights to all services, gently.

    First comes word that they come, so that a service knows when a push begins.
    """
    await world.broadcast_object(True)
    for piece in pieces(weights):
        await world.broadcast(piece)
        await asyncio.sleep(PAUSE)


# -- all other ranks ---------------------------------------------------------------------------------------------------


class Service:
    """The weights that answer, those that arrive, and when pushes were."""

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        self.active = Model(shape, np.zeros(shape.count, np.float32))
        self._standby = Model(shape, np.zeros(shape.count, np.float32))
        self.is_settled = asyncio.Event()
        """There are weights, or there never will be."""
        self.pushes: deque[tuple[float, float]] = deque(maxlen=REMEMBERED_PUSHES)
        """Begin and end of the pushes, by ``time.monotonic``, which all processes of a host share."""

    async def follow(self) -> None:
        """Be a rank of the world, and take what the trainer pushes for as long as it is there."""
        try:
            node = await ap.Node.start()
            try:
                while True:
                    await self._take_push(node.world)
            finally:
                await node.stop()
        except (ap.PeerLost, ap.PeerCancelled) as error:
            print(f"no more pushes after version {self.active.version}: {error}", flush=True)
        finally:
            self.is_settled.set()

    async def _take_push(self, world: ap.Communicator) -> None:
        await world.broadcast_object()
        begin = time.monotonic()
        for piece in pieces(self._standby.weights):
            await world.broadcast(piece)
        self.active, self._standby = self._standby, self.active
        self.pushes.append((begin, time.monotonic()))
        self.is_settled.set()


class Question(BaseModel):
    tokens: list[int] = Field(min_length=1, max_length=1024)


def make_app(service: Service) -> FastAPI:
    """Return the application.  Its lifespan is that of a node, and it is up when the first weights are there."""

    @contextlib.asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
        following = asyncio.create_task(service.follow())
        try:
            await service.is_settled.wait()
            yield
        finally:
            following.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await following

    app = FastAPI(lifespan=lifespan)

    @app.post("/predict")
    async def predict(question: Question) -> dict[str, object]:
        model = service.active  # no await from here on: the buffers cannot change places
        tokens, rows = np.array(question.tokens), service.shape.rows
        if model.version == 0:
            raise HTTPException(503, "there are no weights")
        if tokens.min() < 0 or tokens.max() >= rows:
            raise HTTPException(422, f"tokens: expected 0..{rows - 1}")
        scores = model.scores(tokens)
        return {"version": model.version, "label": int(scores.argmax()), "scores": scores.tolist()}

    @app.get("/status")
    async def status() -> dict[str, object]:
        return {"version": service.active.version, "pushes": list(service.pushes)}

    return app


class Server(uvicorn.Server):
    """Leaves signals to this program: uvicorn itself would end the process by the signal that ended the service."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def serve(shape: Shape, listener: socket.socket) -> None:
    """Answer requests until the program is stopped."""
    service = Service(shape)
    server = Server(uvicorn.Config(make_app(service), lifespan="on", log_level="warning", timeout_graceful_shutdown=5))
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        await asyncio.shield(serving)
    except asyncio.CancelledError:
        server.should_exit = True
        service.is_settled.set()  # if it is still starting
        await serving
        raise
    raise SystemExit("the service ended by itself: see above")


# -- the program -------------------------------------------------------------------------------------------------------


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="An inference service whose weights a trainer pushes.")
    parser.add_argument("--host", default="127.0.0.1", help="where the services listen (default: %(default)s)")
    parser.add_argument("--port", type=int, default=8000, help="of the first service; 0: any (default: %(default)s)")
    parser.add_argument("--push-every", type=float, default=1.0, metavar="SECONDS", help="(default: %(default)s)")
    parser.add_argument("--rows", type=int, default=65_536, help="tokens there are (default: %(default)s)")
    parser.add_argument("--width", type=int, default=96, help="of an embedding (default: %(default)s, 25 MB)")
    options = parser.parse_args()
    if min(options.rows, options.width) < 1 or options.push_every < 0 or not 0 <= options.port < 65_536:
        parser.error("expected positive numbers, and a port below 65536")
    return options


async def run_rank(rank: int, options: argparse.Namespace) -> None:
    """Be the trainer or a service, until SIGTERM or Ctrl-C."""
    shape = Shape(options.rows, options.width)
    if rank == 0:
        work = asyncio.create_task(train(shape, options.push_every))
    else:
        port = options.port and options.port + rank - 1
        try:
            listener = socket.create_server((options.host, port))
        except OSError as error:
            reason = os.strerror(error.errno or 0)
            raise SystemExit(f"serve_weights: {options.host}:{port} cannot be bound: {reason}") from error
        where = "http://{}:{}".format(*listener.getsockname())
        print(f"rank {rank} serves on {where} once it has weights", flush=True)
        work = asyncio.create_task(serve(shape, listener))
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, work.cancel)
    try:
        with contextlib.suppress(asyncio.CancelledError):
            await work
    except ap.PeerError as error:  # another rank did not come; it says why itself
        raise SystemExit(f"serve_weights: {error}") from None


def main() -> None:
    options = parse_arguments()
    if int(os.environ.get("WORLD_SIZE", "1")) < 2:
        sys.exit("serve_weights: expected a trainer and at least one service; start it with `asyncpar launch`")
    ap.run(run_rank(int(os.environ["RANK"]), options))


if __name__ == "__main__":
    main()
