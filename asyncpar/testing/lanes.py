"""The conformance suite of lanes: the promises of every ``Lane`` over any transport.

Subclass ``LaneConformance`` in a test module, say how to make a connected pair, and pytest runs the suite against it::

    class TestMyLane(LaneConformance):
        @asynccontextmanager
        async def connect(self):
            yield LanePair(one=..., other=..., sever=...)

The suite needs pytest for nothing but collecting it.
"""

from __future__ import annotations

from asyncpar.testing.lane_delivery import LaneDelivery
from asyncpar.testing.lane_ending import LaneEnding
from asyncpar.testing.lane_pairs import LanePair, LaneSuite, RecordingEvents, finished, frame, on_loop, pattern

__all__ = ["LaneConformance", "LanePair", "LaneSuite", "RecordingEvents", "finished", "frame", "on_loop", "pattern"]


class LaneConformance(LaneDelivery, LaneEnding):
    """The suite.  Each test is one promise of ``Lane``."""
