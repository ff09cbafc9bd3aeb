"""A process for the examples that need only one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.program_host import ProgramHost


@pytest.fixture(scope="session")
def host() -> Iterator[ProgramHost]:
    made = ProgramHost()
    yield made
    made.close()
