"""Streams of a call, in both directions, item by item and with credit.

``served``: the streams of a call where it is served; ``feeds``: what its caller brings along.  ``producing`` and
``reading`` are the two ends of one stream, ``flow`` (pure) says how far one may be ahead of the other, ``annotations``
what is a stream.
"""
