"""Modules are loaded without garbage collection, and that is as it was afterwards."""

from __future__ import annotations

import gc
import subprocess
import sys
from collections.abc import Iterator

import pytest

from asyncpar.core.loading import without_collection


@pytest.fixture(autouse=True)
def collection() -> Iterator[None]:
    was_on = gc.isenabled()
    yield
    (gc.enable if was_on else gc.disable)()


@pytest.mark.parametrize("is_on", [True, False])
def test_it_is_on_again_if_it_was(*, is_on: bool) -> None:
    (gc.enable if is_on else gc.disable)()
    with without_collection():
        assert not gc.isenabled()
        with without_collection():
            assert not gc.isenabled()
        assert not gc.isenabled()
    assert gc.isenabled() == is_on


def test_it_is_on_again_after_an_error() -> None:
    gc.enable()
    with pytest.raises(ImportError), without_collection():
        raise ImportError("no such module")
    assert gc.isenabled()


@pytest.mark.parametrize(
    ("before", "then"),
    [
        ("", "assert not gc.get_freeze_count() and is_old(decimal)"),
        (
            "gc.freeze(); frozen = gc.get_freeze_count()",
            "assert gc.get_freeze_count() == frozen and not is_old(decimal)",
        ),
    ],
    ids=["nothing is frozen", "frozen objects stay so"],
)
def test_what_is_loaded_is_old_unless_the_program_has_frozen_objects(before: str, then: str) -> None:
    program = f"""
import gc
from asyncpar.core.loading import without_collection

def is_old(module):
    return any(one is module.__dict__ for one in gc.get_objects(generation=2))

{before}
with without_collection():
    import decimal
{then}
"""
    subprocess.run([sys.executable, "-c", program], check=True)


def test_frozen_objects_are_not_counted_where_nothing_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """That takes as long as there are many."""

    def count() -> int:
        raise AssertionError("they were counted")

    monkeypatch.setattr(gc, "get_freeze_count", count)
    with without_collection():
        import gc as _  # noqa: F401  # known
