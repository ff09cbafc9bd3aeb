"""Many ranks in one process, each used by its own thread."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

from asyncpar.blocking.node import Node
from asyncpar.blocking.thread import background
from asyncpar.testing.world import local_world

T = TypeVar("T")


@contextmanager
def blocking_world(
    size: int,
    *,
    transport: str | None = "inproc",
    hosts: Sequence[str] | None = None,
    pin: str | None = None,
    arena: bool = True,
) -> Iterator[tuple[Node, ...]]:
    """Yield the nodes of a world of ``size`` ranks in this process, all on the background loop, and close them all.

    Collectives need a thread for each rank; see ``run_ranks``.  The arguments ``transport``, ``hosts``, ``pin`` and
    ``arena`` are those of ``local_world``.
    """
    thread = background()
    context = local_world(size, transport=transport, hosts=hosts, pin=pin, arena=arena)
    nodes = tuple(Node(thread, node) for node in thread.call(context.__aenter__, what="blocking_world"))
    try:
        yield nodes
    finally:
        for node in nodes:
            node.close()
        if not thread.is_closed:
            thread.call(lambda: context.__aexit__(None, None, None), what="blocking_world")


def run_ranks(nodes: Sequence[Node], work: Callable[[Node], T]) -> list[T]:
    """Call ``work(node)`` for every node, each in a thread of its own, and return the results by rank.

    A node whose call raises is closed, as if its process had ended; when all calls have ended, the first error is
    raised.  Ctrl-C closes all nodes.
    """
    results: dict[int, T] = {}
    errors: list[BaseException] = []

    def run(node: Node) -> None:
        try:
            results[node.rank] = work(node)
        except BaseException as error:  # noqa: BLE001  # raised again below
            errors.append(error)
            node.close()

    threads = [threading.Thread(target=run, args=(node,), name=f"rank {node.rank}", daemon=True) for node in nodes]
    for thread in threads:
        thread.start()
    try:
        for thread in threads:
            thread.join()
    except BaseException:
        for node in nodes:
            node.close()
        raise
    if errors:
        raise errors[0]
    return [results[node.rank] for node in nodes]
