"""Settings of the children of a supervisor."""

from __future__ import annotations

import math
from typing import Any

import pytest

from asyncpar.actors.runtime.actor import Actor
from asyncpar.actors.supervision.child import Child, ChildRecord, check_children, describe_briefly, name_children
from asyncpar.actors.supervision.policy import Restart
from asyncpar.errors import UsageError


class Idle(Actor):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass


def test_a_child_is_a_class_and_the_arguments_of_its_constructor() -> None:
    child = Child(Idle, 1, "two", name="c", restart="transient", shutdown=math.inf, three=3)
    assert (child.actor_class, child.args, dict(child.kwargs)) == (Idle, (1, "two"), {"three": 3})
    assert (child.name, child.restart, child.shutdown) == ("c", Restart.TRANSIENT, math.inf)
    assert repr(child) == "<transient child 'c': Idle>"


@pytest.mark.parametrize("shutdown", [-1.0, math.nan, "5", True])
def test_an_impossible_shutdown_is_refused(shutdown: Any) -> None:
    with pytest.raises(UsageError, match=r"^shutdown: expected a number of seconds, 0 or more, got"):
        Child(Idle, shutdown=shutdown)


def test_an_unknown_restart_is_refused() -> None:
    with pytest.raises(
        UsageError, match=r"^restart: expected one of 'permanent', 'transient', 'temporary', got 'often'"
    ):
        Child(Idle, restart="often")


@pytest.mark.parametrize("actor_class", [int, Idle(), "Idle"])
def test_what_is_no_actor_class_is_refused(actor_class: Any) -> None:
    with pytest.raises(UsageError, match="expected a subclass of Actor"):
        Child(actor_class)


@pytest.mark.parametrize("name", ["", "x" * 256, "a\nb", 1])
def test_an_impossible_name_is_refused(name: Any) -> None:
    with pytest.raises(UsageError, match=r"^name: expected 1 to 255 printable characters"):
        Child(Idle, name=name)


@pytest.mark.parametrize("children", [Child(Idle), "ab", None])
def test_children_that_are_no_list_are_refused(children: Any) -> None:
    with pytest.raises(UsageError, match=r"^children: expected a list of Child, got"):
        check_children(children)


def test_a_list_of_something_else_is_refused() -> None:
    with pytest.raises(UsageError, match=r"^children: expected a list of Child, got <class .*Idle'> in it"):
        check_children([Child(Idle), Idle])


def test_two_children_of_one_name_are_refused() -> None:
    with pytest.raises(UsageError, match=r"^children: expected names that differ, got 'a' twice"):
        check_children([Child(Idle, name="a"), Child(Idle, name="a")])


def test_children_without_a_name_get_one_that_is_free() -> None:
    children = [Child(Idle), Child(Idle, name="s/Idle-2"), Child(Idle), Child(Idle, name="b")]
    assert name_children(children, "s") == ["s/Idle", "s/Idle-2", "s/Idle-3", "b"]


def test_a_failure_is_described_in_a_line() -> None:
    assert describe_briefly(ValueError("no")) == "ValueError: no"


def test_a_child_has_five_seconds_to_stop_and_a_supervisor_has_no_limit() -> None:
    assert ChildRecord("a", Child(Idle), is_supervisor=False).shutdown == 5.0
    assert ChildRecord("a", Child(Idle), is_supervisor=True).shutdown is None
    assert ChildRecord("a", Child(Idle, shutdown=1.0), is_supervisor=True).shutdown == 1.0
    assert ChildRecord("a", Child(Idle, shutdown=math.inf), is_supervisor=False).shutdown is None
