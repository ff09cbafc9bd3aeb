"""MPI libraries are accepted or refused, shown without one."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

from asyncpar.backends.config import BackendUnavailable
from asyncpar.backends.mpi.backend import load_mpi

SINGLE, FUNNELED, SERIALIZED, MULTIPLE = range(4)


def install(monkeypatch: pytest.MonkeyPatch, level: int, *, is_main: bool) -> SimpleNamespace:
    library = SimpleNamespace(
        THREAD_SINGLE=SINGLE, THREAD_FUNNELED=FUNNELED, Query_thread=lambda: level, Is_thread_main=lambda: is_main
    )
    monkeypatch.setitem(sys.modules, "mpi4py", SimpleNamespace(MPI=library))
    return library


@pytest.mark.parametrize(
    ("level", "is_main"), [(FUNNELED, True), (SERIALIZED, False), (SERIALIZED, True), (MULTIPLE, False)]
)
def test_a_library_that_may_be_called_from_this_thread_is_taken(
    monkeypatch: pytest.MonkeyPatch, level: int, is_main: bool
) -> None:
    library = install(monkeypatch, level, is_main=is_main)
    assert load_mpi() is library


@pytest.mark.parametrize(("level", "is_main"), [(SINGLE, True), (SINGLE, False), (FUNNELED, False)])
def test_one_that_may_not_is_refused_and_the_error_says_what_to_set(
    monkeypatch: pytest.MonkeyPatch, level: int, is_main: bool
) -> None:
    install(monkeypatch, level, is_main=is_main)
    with pytest.raises(BackendUnavailable, match=r'set mpi4py.rc.thread_level to "serialized" or "multiple"'):
        load_mpi()


def test_without_mpi4py_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    with pytest.raises(BackendUnavailable, match="mpi4py"):
        load_mpi()
