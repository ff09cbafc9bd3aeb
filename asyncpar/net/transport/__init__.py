"""Lanes, which carry frames, and links, which bundle the traffic of two ranks; no collectives or actors."""
