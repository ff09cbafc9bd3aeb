"""Every name, default and value of the contract exists under the import path that the README gives."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

CONTRACT: dict[str, Any] = json.loads((Path(__file__).parent / "goldens" / "contract.json").read_text())
"""By module: names, with their members (``name()`` is to be callable), parameters in order, and defaults."""

TYPES = [(module, name) for module, names in CONTRACT.items() for name in names]


def resolve(module: str, name: str) -> Any:
    return getattr(importlib.import_module(module), name)


def entries(part: str) -> list[Any]:
    return [
        pytest.param(module, name, CONTRACT[module][name][part], id=f"{module}.{name}")
        for module, name in TYPES
        if part in CONTRACT[module][name]
    ]


def members_of(kind: Any) -> set[str]:
    """Return what an instance of ``kind`` has, also what its methods set."""
    fields = {field.name for field in dataclasses.fields(kind)} if dataclasses.is_dataclass(kind) else set()
    return {*dir(kind), *fields, *re.findall(r"self\.(\w+)", inspect.getsource(kind))}


@pytest.mark.parametrize(("module", "name"), TYPES, ids=str)
def test_every_name_can_be_imported_and_is_public(module: str, name: str) -> None:
    assert resolve(module, name) is not None
    assert name in importlib.import_module(module).__all__


@pytest.mark.parametrize(("module", "name", "members"), entries("members"))
def test_every_member_is_there(module: str, name: str, members: list[str]) -> None:
    kind = resolve(module, name)
    there = members_of(kind)
    assert [member for member in members if member.removesuffix("()") not in there] == []
    methods = [member.removesuffix("()") for member in members if member.endswith("()")]
    assert [method for method in methods if not callable(getattr(kind, method))] == []


@pytest.mark.parametrize(("module", "name", "parameters"), entries("parameters"))
def test_parameters_have_the_names_of_the_contract(module: str, name: str, parameters: list[str]) -> None:
    got = list(inspect.signature(resolve(module, name)).parameters)
    assert [parameter for parameter in parameters if parameter not in got] == []


@pytest.mark.parametrize(("module", "name", "positional"), entries("positional"))
def test_constructors_take_their_arguments_by_position(module: str, name: str, positional: list[str]) -> None:
    signature = inspect.signature(resolve(module, name))
    assert list(signature.parameters)[: len(positional)] == positional
    signature.bind_partial(*positional)


@pytest.mark.parametrize(("module", "name", "defaults"), entries("defaults"))
def test_defaults_are_those_of_the_contract(module: str, name: str, defaults: Mapping[str, Any]) -> None:
    default = resolve(module, name)()
    got = {field: getattr(default, field) for field in defaults}
    plain = {field: list(value) if isinstance(value, tuple) else value for field, value in got.items()}
    assert plain == defaults


@pytest.mark.parametrize(("module", "name", "choices"), entries("choices"))
def test_enumerations_have_all_their_members(module: str, name: str, choices: list[str]) -> None:
    assert [choice for choice in choices if not hasattr(resolve(module, name), choice)] == []
