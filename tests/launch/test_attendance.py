"""An agent's stream to the coordinator."""

from asyncpar._proto.asyncpar.v1 import membership_pb2_grpc
from asyncpar.launch import agent_events
from asyncpar.launch.attendance import Attendance
from asyncpar.launch.plan import Hello
from asyncpar.transport.rpc import Credentials, RpcServer

HELLO = Hello(job="j", nnodes=1, nproc=1, node_rank=0, host="h")


async def test_a_coordinator_with_another_secret_is_told_apart_from_a_lost_one() -> None:
    server = RpcServer(Credentials(b"s" * 32))
    membership_pb2_grpc.add_CoordinatorServicer_to_server(  # type: ignore[no-untyped-call]
        membership_pb2_grpc.CoordinatorServicer(), server.server
    )
    await server.start()
    taken: list[agent_events.Event] = []
    for _ in range(20):
        stranger = Attendance(server.address, Credentials(b"x" * 32), timeout=10.0, take=taken.append)
        await stranger.run(HELLO)
    await server.stop(grace=0)
    assert len(taken) == 20
    for event in taken:
        assert isinstance(event, agent_events.CoordinatorLost)
        assert "did not accept our secret" in event.cause


async def test_a_coordinator_that_never_comes_is_waited_for_and_no_longer() -> None:
    taken: list[agent_events.Event] = []
    await Attendance("127.0.0.1:9", Credentials(b"s" * 32), timeout=0.2, take=taken.append).run(HELLO)
    (event,) = taken
    assert isinstance(event, agent_events.CoordinatorLost)
    assert "no coordinator answered at 127.0.0.1:9 for 0.2 s" in event.cause
