"""Codecs that work on the device where the array is, with the bytes of the host's."""
