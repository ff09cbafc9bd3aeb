"""Codecs that work on the device of the array, with the bytes of the host's."""
