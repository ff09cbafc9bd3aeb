"""Settings of the tests of synchronizers."""

from tests.small_arenas import small_arenas

__all__ = ["small_arenas"]
