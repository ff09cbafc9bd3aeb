from __future__ import annotations

from collections.abc import Iterator

import pytest

from asyncpar.blocking import LoopThread


@pytest.fixture
def thread() -> Iterator[LoopThread]:
    """A loop thread of the test's own."""
    thread = LoopThread("loop under test")
    yield thread
    thread.close()
    assert not thread._thread.is_alive()  # noqa: SLF001  # close() says nothing of the thread itself, which must not outlive it
