"""``help`` of what is used most names every argument, has an example that runs, and says what is returned."""

from __future__ import annotations

import ast
import asyncio
import inspect
import textwrap
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import asyncpar as ap
import asyncpar.blocking
from asyncpar.testing import local_world

MOST_USED: dict[str, Callable[..., Any]] = {
    "run": ap.run,
    "init": ap.init,
    "spawn": ap.Node.spawn,
    "all_reduce": ap.Communicator.all_reduce,
    "all_gather": ap.Communicator.all_gather,
    "broadcast": ap.Communicator.broadcast,
    "reduce_scatter": ap.Communicator.reduce_scatter,
    "barrier": ap.Communicator.barrier,
    "send": ap.Communicator.send,
    "recv": ap.Communicator.recv,
}
NAMED_ELSEWHERE = {"self", "actor", "args", "kwargs"}


def example_of(function: Callable[..., Any]) -> str:
    """Return the code of the example in the documentation of ``function``."""
    _, found, code = (inspect.getdoc(function) or "").partition("\nExample::\n")
    assert found, f"{function.__qualname__} has no example"
    return textwrap.dedent(code)


async def run_code(code: str, **names: Any) -> dict[str, Any]:
    """Run ``code``, in which there may be ``await``, with ``names``, and return what it sets."""
    flags = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
    scope: dict[str, Any] = {"ap": ap, "np": np, **names}
    ran = eval(compile(code, "<example>", "exec", flags=flags, dont_inherit=True), scope)
    if inspect.isawaitable(ran):
        await ran
    return scope


@pytest.mark.parametrize("name", MOST_USED)
def test_help_names_every_argument(name: str) -> None:
    function = MOST_USED[name]
    text = inspect.getdoc(function) or ""
    arguments = set(inspect.signature(function).parameters) - NAMED_ELSEWHERE
    assert [one for one in sorted(arguments) if f"``{one}``" not in text and f"``{one}=" not in text] == []


@pytest.mark.parametrize("name", MOST_USED)
def test_help_says_what_is_returned(name: str) -> None:
    returned = str(inspect.signature(MOST_USED[name]).return_annotation)
    assert not returned.removeprefix("Coroutine[Any, Any, ").startswith("Any")


@pytest.mark.parametrize("name", sorted(MOST_USED.keys() - {"run"}))
async def test_examples_run(name: str) -> None:
    code = example_of(MOST_USED[name])
    async with local_world(2) as nodes:
        await asyncio.gather(*(run_code(code, node=node, comm=node.world) for node in nodes))


def test_the_example_of_run_runs() -> None:
    scope: dict[str, Any] = {"ap": ap}
    exec(compile(example_of(ap.run), "<example>", "exec", dont_inherit=True), scope)
    assert scope["rank"] == 0


def test_examples_of_blocking_programs_have_no_await() -> None:
    blocking = asyncpar.blocking.Communicator
    texts = [inspect.getdoc(getattr(blocking, name)) or "" for name in MOST_USED if hasattr(blocking, name)]
    assert len(texts) >= 7
    assert [text for text in texts if "await comm." in text] == []
