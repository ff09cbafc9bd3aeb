"""What an endpoint accepts and returns, read once from its signature; and the binding of received arguments to it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_type_hints

import msgspec

from asyncpar.errors import UsageError
from asyncpar.runtime.actor import Actor, endpoint_mark
from asyncpar.wire.array import Buffer
from asyncpar.wire.payload import Extension, PayloadDecoder

_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
_BY_NAME = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


@dataclass(frozen=True, slots=True)
class Parameter:
    """One parameter: what to call it in messages, and the decoder that checks its arguments."""

    name: str
    what: str
    is_required: bool
    decoder: PayloadDecoder[Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class EndpointSpec:
    """One endpoint of an actor class, or its constructor.

    ``title`` is its name for people (``Counter.add``).  ``concurrency`` is how many of its calls may run at once,
    beside others; None if it runs alone.
    """

    name: str
    title: str
    is_async: bool
    concurrency: int | None
    positional: tuple[Parameter, ...]
    by_name: Mapping[str, Parameter]
    required: frozenset[str]
    rest: Parameter | None
    keyword_rest: Parameter | None
    result: PayloadDecoder[Any]

    def check(self, count: int, names: Sequence[str]) -> None:
        """Raise ``UsageError`` unless ``count`` positional arguments and the named ones satisfy the signature."""
        if count > len(self.positional) and self.rest is None:
            raise UsageError(f"{self.title}() takes {self._expected()}, got {count} positional arguments")
        given = {parameter.name for parameter in self.positional[:count]}
        for name in names:
            if name in given and name in self.by_name:
                raise UsageError(f"{self.title}() got argument {name!r} twice")
            if name not in self.by_name and self.keyword_rest is None:
                raise UsageError(f"{self.title}() takes {self._expected()}, got an unknown argument {name!r}")
        missing = self.required - given - (set(names) & self.by_name.keys())
        if missing:
            raise UsageError(
                f"{self.title}() misses {', '.join(map(repr, sorted(missing)))}; it takes {self._expected()}"
            )

    def bind(
        self, arguments: Sequence[msgspec.Raw], keywords: Mapping[str, msgspec.Raw], payload: Buffer
    ) -> tuple[list[Any], dict[str, Any]]:
        """Return the decoded arguments.

        Raises ``UsageError`` if they do not fit the signature, ``ProtocolError`` if they are damaged.
        """
        if keywords or len(arguments) != len(self.required) or len(arguments) != len(self.positional):
            self.check(len(arguments), tuple(keywords))
        args = [
            parameter.decoder.decode_part(argument, payload, what=parameter.what)
            for parameter, argument in zip(self.positional, arguments, strict=False)
        ]
        if self.rest is not None:
            rest = self.rest
            args += [
                rest.decoder.decode_part(part, payload, what=rest.what) for part in arguments[len(self.positional) :]
            ]
        kwargs = {}
        for name, argument in keywords.items():
            parameter = self.by_name.get(name) or self.keyword_rest
            assert parameter is not None, "check() refuses unknown names"
            kwargs[name] = parameter.decoder.decode_part(argument, payload, what=parameter.what)
        return args, kwargs

    def _expected(self) -> str:
        names = [
            *(parameter.name for parameter in self.positional if parameter.name not in self.by_name),
            *self.by_name,
        ]
        return f"({', '.join(names)})" if names else "no arguments"


def describe_endpoints(actor_class: type[Actor], extension: Extension) -> dict[str, EndpointSpec]:
    """Return the endpoints of ``actor_class`` by name.

    Raises ``UsageError`` naming the endpoint for annotations that cannot be resolved or checked.
    """
    described = {}
    for name in sorted(actor_class.endpoints):
        function = getattr(actor_class, name)
        title = f"{actor_class.__qualname__}.{name}"
        described[name] = _describe(title, name, function, extension, concurrency=endpoint_mark(function).concurrency)
    return described


def describe_constructor(actor_class: type[Actor], extension: Extension) -> EndpointSpec:
    """Return what the constructor of ``actor_class`` accepts.  Raises as ``describe_endpoints`` does."""
    if actor_class.__init__ is object.__init__:
        return _describe(actor_class.__qualname__, "", _no_arguments, extension)
    return _describe(actor_class.__qualname__, "", actor_class.__init__, extension)


def _no_arguments(self: object) -> None:
    """Stands for a constructor that takes nothing."""


def _describe(
    title: str,
    name: str,
    function: Callable[..., Any],
    extension: Extension,
    *,
    concurrency: int | None = None,
) -> EndpointSpec:
    try:
        hints = get_type_hints(function, include_extras=True)
    except (NameError, TypeError, SyntaxError) as error:
        raise UsageError(f"endpoint {title}: its annotations cannot be resolved at run time: {error}") from error

    def decoder(parameter: str, what: str) -> PayloadDecoder[Any]:
        try:
            return PayloadDecoder[Any](hints.get(parameter, Any), extension=extension)
        except UsageError as error:
            raise UsageError(f"endpoint {title}: {what}: {error}") from error

    _, *declared = inspect.signature(function).parameters.values()
    parameters: dict[str, tuple[inspect.Parameter, Parameter]] = {}
    for item in declared:
        what = f"argument {item.name!r} of {title}()"
        is_required = item.default is item.empty and item.kind in (*_POSITIONAL, *_BY_NAME)
        parameters[item.name] = item, Parameter(item.name, what, is_required, decoder(item.name, what))

    def of_kind(*kinds: object) -> list[Parameter]:
        return [parameter for item, parameter in parameters.values() if item.kind in kinds]

    return EndpointSpec(
        name=name,
        title=title,
        is_async=inspect.iscoroutinefunction(function),
        concurrency=concurrency,
        positional=tuple(of_kind(*_POSITIONAL)),
        by_name={parameter.name: parameter for parameter in of_kind(*_BY_NAME)},
        required=frozenset(parameter.name for _, parameter in parameters.values() if parameter.is_required),
        rest=next(iter(of_kind(inspect.Parameter.VAR_POSITIONAL)), None),
        keyword_rest=next(iter(of_kind(inspect.Parameter.VAR_KEYWORD)), None),
        result=decoder("return", "result"),
    )
