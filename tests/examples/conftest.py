"""A process for the examples that need only one, and an environment in which examples draw no pictures."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.program_host import ProgramHost


@pytest.fixture(scope="session")
def host() -> Iterator[ProgramHost]:
    made = ProgramHost()
    yield made
    made.close()


@pytest.fixture(scope="module")
def no_pictures(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Let programs find no matplotlib, whose import and first picture take half a second."""
    folder = tmp_path_factory.mktemp("no_pictures")
    (folder / "matplotlib.py").write_text("raise ImportError('no pictures here')\n")
    path = [str(folder), *filter(None, [os.environ.get("PYTHONPATH")])]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(path))
        yield
