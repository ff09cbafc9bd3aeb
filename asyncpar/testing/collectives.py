"""The conformance suite of communicators: the promises of every ``Communicator`` over any transport.

Subclass ``CommunicatorConformance`` in a test module, say how to make a world, and pytest runs the suite against it::

    class TestMyBackend(CommunicatorConformance):
        @asynccontextmanager
        async def connect(self, size):
            yield [...]  # one communicator per rank, or per rank of this process

The suite needs pytest (and its asyncio mode) for nothing but running it.
"""

from __future__ import annotations

from asyncpar.testing.collective_bundles import Bundles
from asyncpar.testing.collective_moves import DataMovementSuite
from asyncpar.testing.collective_reductions import ReductionSuite
from asyncpar.testing.collective_rules import OrderingSuite
from asyncpar.testing.collective_worlds import CommunicatorSuite, errors_on_all, on_all, ranked, values

__all__ = ["CommunicatorConformance", "CommunicatorSuite", "errors_on_all", "on_all", "ranked", "values"]


class CommunicatorConformance(ReductionSuite, Bundles, DataMovementSuite, OrderingSuite):
    """The suite.  Each test is one promise of ``Communicator``."""
