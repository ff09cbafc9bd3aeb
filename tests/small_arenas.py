"""Ranks of tests share less memory than those of jobs: taking and mapping 8 MiB costs more than most tests do in it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

ARENA_BYTES = "2M"
"""Room for some groups, of which the first sends half a megabyte at once, as with the default size."""


@pytest.fixture(scope="module", autouse=True)
def small_arenas() -> Iterator[None]:
    """Give each rank that a test of this folder starts a small part of its host's memory."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ASYNCPAR_ARENA_BYTES", ARENA_BYTES)
        yield
