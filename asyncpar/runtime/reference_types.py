"""Annotations that name an actor's class mean references to such actors, also if the class is a dataclass."""

from __future__ import annotations

from dataclasses import is_dataclass
from functools import reduce
from operator import or_
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from asyncpar.runtime.actor import ActorType
from asyncpar.runtime.ref import ActorRef


def with_references(annotation: Any) -> Any:
    """Return ``annotation`` with ``ActorRef[C]`` in place of each actor's class ``C`` that is a dataclass.

    Decoders would take such a class for plain data; other classes they leave to ``RefExtension``.
    """
    if isinstance(annotation, ActorType):
        return ActorRef[annotation] if is_dataclass(annotation) else annotation
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin in (None, ActorRef, Literal) or any(isinstance(argument, list) for argument in arguments):
        return annotation
    if origin is Annotated:
        return Annotated[(with_references(arguments[0]), *arguments[1:])]
    replaced = tuple(with_references(argument) for argument in arguments)
    if replaced == arguments:
        return annotation
    return reduce(or_, replaced) if origin in (Union, UnionType) else origin[replaced]
