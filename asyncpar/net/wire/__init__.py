"""Conversion between bytes and frames.  Pure: no event loop, no sockets, no clock."""
