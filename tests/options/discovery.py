"""Finds every option: parameters with a default of public classes, configurations and constructors alike."""

from __future__ import annotations

import dataclasses
import enum
import importlib
import inspect
import pkgutil
import typing
from typing import Any, NamedTuple

import asyncpar


class Option(NamedTuple):
    """Parameter ``name`` of the class ``owner``, which is called by the path that users import it from."""

    owner: str
    name: str

    def __str__(self) -> str:
        return f"{self.owner}.{self.name}"


def public_modules() -> list[Any]:
    """Return the modules that say what of them is public, packages before their modules; but for the deprecated one."""
    names = [found.name for found in pkgutil.walk_packages(asyncpar.__path__, "asyncpar.")]
    modules = [
        importlib.import_module(name)
        for name in ("asyncpar", *names)
        if "._proto" not in name
        and name != "asyncpar.config"
        and not name.startswith(
            (
                "asyncpar.jax",
                "asyncpar.torch",
                "asyncpar.device.codecs.torch_",
                "asyncpar.engines.ray_collective",
                "asyncpar.engines.ray_engine",
                "asyncpar.engines.ray_train",
                "asyncpar.launch.torchx.dist",
            )
        )
        and not name.endswith("__main__")
    ]
    return sorted((one for one in modules if hasattr(one, "__all__")), key=lambda one: one.__name__.count("."))


def public_classes() -> dict[str, type]:
    """Return classes that users may construct, by the shortest path; no exceptions, enumerations, protocols."""
    found: dict[type, str] = {}
    for module in public_modules():
        for name in module.__all__:
            kind = getattr(module, name)
            if not inspect.isclass(kind) or typing.is_typeddict(kind) or issubclass(kind, BaseException | enum.Enum):
                continue
            if not getattr(kind, "_is_protocol", False) and kind.__module__.startswith("asyncpar"):
                found.setdefault(kind, f"{module.__name__}.{name}")
    return {path: kind for kind, path in found.items()}


def options_of(path: str, kind: type) -> list[Option]:
    """Return the options of a class, by its constructor."""
    if not dataclasses.is_dataclass(kind) and all("__init__" not in vars(base) for base in kind.__mro__[:-1]):
        return []
    parameters = inspect.signature(kind).parameters.values()
    return [Option(path, one.name) for one in parameters if one.default is not inspect.Parameter.empty]


def all_options() -> list[Option]:
    """Return the options of all public classes."""
    return [option for path, kind in public_classes().items() for option in options_of(path, kind)]
