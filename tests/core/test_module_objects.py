"""Objects of modules are not looked at by the garbage collector."""

from __future__ import annotations

import gc
import subprocess
import sys
import weakref
from collections.abc import Iterator

import pytest

from asyncpar.core.module_objects import kept_from_collection


class Ring:
    """Garbage once it is dropped: it refers to itself."""

    def __init__(self) -> None:
        self.itself = self


@pytest.fixture(autouse=True)
def collection_is_on_afterwards() -> Iterator[None]:
    yield
    gc.enable()


def test_what_is_made_within_is_kept_from_collection() -> None:
    before = gc.get_freeze_count()
    with kept_from_collection():
        assert not gc.isenabled()
        kept = [Ring() for _ in range(1000)]
    assert gc.isenabled()
    assert gc.get_freeze_count() >= before + len(kept)


def test_garbage_of_the_program_is_collected_before() -> None:
    ring = Ring()
    is_there = weakref.ref(ring)
    del ring
    with kept_from_collection():
        assert is_there() is None


def test_collection_goes_on_after_an_import_that_fails() -> None:
    with pytest.raises(ImportError), kept_from_collection():
        raise ImportError
    assert gc.isenabled()


def test_nothing_is_changed_where_the_program_has_put_collection_off() -> None:
    before = gc.get_freeze_count()
    gc.disable()
    with kept_from_collection():
        kept = [Ring() for _ in range(1000)]
    assert not gc.isenabled()
    assert gc.get_freeze_count() < before + len(kept)


def test_the_first_public_name_keeps_modules_from_collection_and_leaves_it_on() -> None:
    program = "import gc, asyncpar as ap; ap.init; print(gc.isenabled(), gc.get_freeze_count() > 10_000)"

    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)

    assert done.stdout.split() == ["True", "True"]
