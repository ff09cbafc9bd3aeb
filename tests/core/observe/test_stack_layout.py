"""The place of stacks in memory is found in the interpreter that runs, and lines are read from its tables."""

from __future__ import annotations

import argparse
import asyncio.base_events
import inspect
import os
import random
import sys
import typing
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, ModuleType

import pytest

from asyncpar.core.observe.stack_layout import Read, StackLayout, find_layout, line_at, read_stacks
from tests.soak import first

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="memory is read by way of /proc")


@pytest.fixture
def read() -> Iterator[Read]:
    memory = os.open("/proc/self/mem", os.O_RDONLY)
    yield lambda address, count: os.pread(memory, count, address)
    os.close(memory)


@pytest.fixture
def layout(read: Read) -> StackLayout:
    found = find_layout(read)
    assert found is not None, "this interpreter keeps its stacks elsewhere: no rank of it can be read"
    return found


def codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for each in code.co_consts:
        if isinstance(each, CodeType):
            yield from codes(each)


@pytest.mark.parametrize("module", first(2, [asyncio.base_events, argparse, inspect, typing]))
def test_lines_are_those_of_the_interpreter(module: ModuleType) -> None:
    assert module.__file__ is not None
    for code in codes(compile(Path(module.__file__).read_text(), module.__file__, "exec")):
        for begin, end, line in code.co_lines():
            if line is not None:
                found = {line_at(code.co_linetable, code.co_firstlineno, place) for place in range(begin, end, 2)}
                assert found == {line}, code


@pytest.mark.parametrize("seed", range(20))
def test_memory_that_is_something_else_is_no_stack(seed: int, read: Read, layout: StackLayout) -> None:
    """The process may have ended, and its number be another one's."""
    chance = random.Random(seed)

    def noise(address: int, count: int) -> bytes:
        if chance.random() < 0.3:
            raise OSError(5, "Input/output error")
        return chance.randbytes(count) if chance.random() < 0.5 else read(address, count)[: chance.randrange(count + 1)]

    assert isinstance(read_stacks(noise, layout), list)
