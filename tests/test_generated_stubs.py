"""Stubs that a program makes from ``proto/`` itself work in the same process as asyncpar, whichever comes first."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.soak import first

ROOT = Path(__file__).resolve().parents[1]
LAYOUTS = {"flat": ("proto/asyncpar/v1", "actors_pb2"), "in folders": ("proto", "asyncpar.v1.actors_pb2")}
TALK = """
import asyncio, importlib, json

def stubs():
    return importlib.import_module({name!r}), importlib.import_module({name!r} + "_grpc")

if {is_first}:
    pb, rpc = stubs()
import grpc
import asyncpar as ap
from asyncpar._proto.asyncpar.v1 import actors_pb2 as ours
pb, rpc = stubs()

class Counter(ap.Actor):
    @ap.endpoint
    async def add(self, n: int) -> int:
        return n + 1

async def main():
    node = await ap.Node.start(serve="localhost:0")
    await node.spawn(Counter, name="counter")
    async with grpc.aio.insecure_channel(node.address) as channel:
        call = pb.ActorCall(actor="counter", endpoint="add", arguments=[pb.Value(json="3")], format=pb.ActorCall.JSON)
        answer = await rpc.ActorsStub(channel).Ask(call, metadata=node.credentials.metadata())
        print(json.loads(answer.value.json), pb.Array.FromString(ours.Array(dtype="x").SerializeToString()).dtype)
    await node.stop()

ap.run(main)
"""


@pytest.fixture(params=LAYOUTS)
def stubs(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Generate what a program would, and return the name of the module with the messages."""
    protoc = pytest.importorskip("grpc_tools.protoc", reason="grpcio-tools (extra dev) is not installed")
    root, name = LAYOUTS[request.param]
    protos = [str(path.relative_to(ROOT / root)) for path in (ROOT / root).rglob("*.proto")]
    into = [f"--python_out={tmp_path}", f"--grpc_python_out={tmp_path}"]
    assert protoc.main(["", f"-I{ROOT / root}", *into, *protos]) == 0
    return name


@pytest.mark.process
@pytest.mark.parametrize("is_first", first(1, [True, False]))
def test_they_talk_to_a_node_of_the_same_process(stubs: str, is_first: bool, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", TALK.format(name=stubs, is_first=is_first)],
        cwd=tmp_path,
        env={"PYTHONPATH": f"{tmp_path}:{ROOT}"},
        capture_output=True,
        text=True,
        timeout=55,
        check=False,
    )
    assert done.stdout == "4 x\n", done.stderr


def test_without_such_stubs_there_are_none() -> None:
    with pytest.raises(ModuleNotFoundError, match=r"asyncpar\.v1\.actors_pb2"):
        __import__("asyncpar.v1.actors_pb2")
