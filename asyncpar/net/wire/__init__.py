"""Bytes to frames and back.  Pure: no event loop, no sockets, no clock."""
