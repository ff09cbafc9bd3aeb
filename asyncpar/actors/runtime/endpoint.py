"""Signatures of endpoints, read once from annotations, and the binding of received arguments to them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, is_dataclass
from functools import reduce
from operator import or_
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import msgspec

from asyncpar.actors.runtime.actor import Actor, ActorType
from asyncpar.actors.runtime.call_streams import ServedStreams
from asyncpar.actors.runtime.declaration import endpoint_mark
from asyncpar.actors.runtime.ref import ActorRef
from asyncpar.actors.runtime.stream_types import StreamType, incoming, outgoing, stream_number
from asyncpar.errors import UsageError
from asyncpar.net.wire.array import Buffer
from asyncpar.net.wire.payload import Extension, PayloadDecoder


def with_references(annotation: Any) -> Any:
    """Return ``annotation`` with ``ActorRef[C]`` in place of each actor's class ``C`` that is a dataclass.

    Decoders would treat such a class as plain data; they leave other classes to ``RefExtension``.
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


_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
_BY_NAME = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


class EndpointParameter(msgspec.Struct, frozen=True):
    """One parameter: its name in messages, and the decoder that checks its arguments."""

    name: str
    what: str
    is_required: bool
    decoder: PayloadDecoder[Any]
    item: PayloadDecoder[Any] | None = None
    """Decodes the items, if the parameter is a stream; then ``decoder`` is for the None that may replace it."""
    is_optional: bool = False
    """Whether None may be passed in place of the stream."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EndpointSpec:
    """One endpoint of an actor class, or its constructor.

    ``title`` is its name in texts (``Counter.add``).  ``concurrency`` is the number of its calls that may run at once,
    alongside others; None if it runs alone.
    """

    name: str
    title: str
    is_async: bool
    is_stream: bool
    concurrency: int | None
    positional: tuple[EndpointParameter, ...]
    by_name: Mapping[str, EndpointParameter]
    required: frozenset[str]
    rest: EndpointParameter | None
    keyword_rest: EndpointParameter | None
    result: PayloadDecoder[Any]
    has_streams: bool
    """Whether it yields or reads streams."""
    plain_count: int = field(init=False)
    """Number of arguments if all are required and may be positional; else -1."""

    def __post_init__(self) -> None:
        names = {parameter.name for parameter in self.positional}
        is_plain = names == self.required and self.rest is None and self.keyword_rest is None
        is_plain = is_plain and self.by_name.keys() <= names
        object.__setattr__(self, "plain_count", len(names) if is_plain else -1)

    def misuse(self, *, wants_stream: bool, is_told: bool) -> str | None:
        """Return the right way to call it, if this way is wrong; else None."""
        if self.is_stream and not wants_stream:
            return f"{self.name}() yields a stream; use `async for ... in ref.{self.name}.stream(...)`"
        if wants_stream and not self.is_stream and not is_told:
            return f"{self.name}() returns one result; use `await ref.{self.name}(...)`"
        return None

    def check(self, count: int, names: Sequence[str]) -> None:
        """Raise ``UsageError`` unless ``count`` positional arguments and the named ones satisfy the signature."""
        if count == self.plain_count and not names:
            return
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
        self,
        arguments: Sequence[msgspec.Raw],
        keywords: Mapping[str, msgspec.Raw],
        payload: Buffer,
        streams: ServedStreams | None = None,
    ) -> tuple[list[Any], dict[str, Any]]:
        """Return the decoded arguments; streams are opened in ``streams``.

        Raises ``UsageError`` if they do not match the signature, ``ProtocolError`` if they are damaged.
        """
        if keywords or len(arguments) != self.plain_count:
            self.check(len(arguments), tuple(keywords))
        args = [
            parameter.decoder.decode_part(argument, payload, what=parameter.what)
            if parameter.item is None
            else _open_stream(parameter, argument, payload, streams)
            for parameter, argument in zip(self.positional, arguments, strict=False)
        ]
        if self.rest is not None:
            rest = self.rest
            args += [_decode(rest, argument, payload, streams) for argument in arguments[len(self.positional) :]]
        kwargs = {}
        for name, argument in keywords.items():
            parameter = self.by_name.get(name) or self.keyword_rest
            assert parameter is not None, "check() refuses unknown names"
            kwargs[name] = _decode(parameter, argument, payload, streams)
        return args, kwargs

    def _expected(self) -> str:
        names = [parameter.name for parameter in self.positional]
        only_by_name = [name for name in self.by_name if name not in names]
        if self.rest is not None:
            names.append(f"*{self.rest.name}")
        elif only_by_name:
            names.append("*")
        names += only_by_name
        if self.keyword_rest is not None:
            names.append(f"**{self.keyword_rest.name}")
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


class EndpointCatalog(dict[type[Any], dict[str, EndpointSpec]]):
    """The endpoints of actor classes by name; each class is described on first lookup."""

    def __init__(self, extension: Extension) -> None:
        super().__init__()
        self._extension = extension

    def __missing__(self, actor_class: type[Actor]) -> dict[str, EndpointSpec]:
        described = self[actor_class] = describe_endpoints(actor_class, self._extension)
        return described


def describe_constructor(actor_class: type[Actor], extension: Extension) -> EndpointSpec:
    """Describe the parameters of the constructor of ``actor_class``.  Raises like ``describe_endpoints``."""
    if actor_class.__init__ is object.__init__:
        return _describe(actor_class.__qualname__, "", _no_arguments, extension)
    return _describe(actor_class.__qualname__, "", actor_class.__init__, extension)


def _no_arguments(self: object) -> None:
    """Stand for a constructor without parameters."""


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
        raise UsageError(
            f"endpoint {title}: its annotations cannot be resolved at run time: {error}; a type that others send must "
            "be defined or imported at the top of the module, and not for type checkers only"
        ) from error

    def decoder(annotation: Any, what: str) -> PayloadDecoder[Any]:
        try:
            return PayloadDecoder[Any](with_references(annotation), extension=extension)
        except UsageError as error:
            raise UsageError(f"endpoint {title}: {what}: {error}") from error

    is_stream = inspect.isasyncgenfunction(function)
    is_async = is_stream or inspect.iscoroutinefunction(function)

    def describe(item: inspect.Parameter) -> EndpointParameter:
        what = f"argument {item.name!r} of {title}()"
        is_required = item.default is item.empty and item.kind in (*_POSITIONAL, *_BY_NAME)
        annotation = hints.get(item.name, Any)
        stream = _incoming(annotation, title, what) if name else None
        if stream is None:
            return EndpointParameter(item.name, what, is_required, decoder(annotation, what))
        if not is_async:
            raise UsageError(f"endpoint {title}: {what}: a stream can only be read by async def, this is a plain def")
        items = decoder(stream.item, what)
        return EndpointParameter(item.name, what, is_required, decoder(None, what), items, stream.is_optional)

    _, *declared = inspect.signature(function).parameters.values()
    parameters = [(item.kind, describe(item)) for item in declared]

    def of_kind(*kinds: object) -> list[EndpointParameter]:
        return [parameter for kind, parameter in parameters if kind in kinds]

    return EndpointSpec(
        name=name,
        title=title,
        is_async=is_async,
        is_stream=is_stream,
        concurrency=concurrency,
        positional=tuple(of_kind(*_POSITIONAL)),
        by_name={parameter.name: parameter for parameter in of_kind(*_BY_NAME)},
        required=frozenset(parameter.name for _, parameter in parameters if parameter.is_required),
        rest=next(iter(of_kind(inspect.Parameter.VAR_POSITIONAL)), None),
        keyword_rest=next(iter(of_kind(inspect.Parameter.VAR_KEYWORD)), None),
        result=decoder(_result(hints.get("return", Any), title, is_stream=is_stream), "result"),
        has_streams=is_stream or any(parameter.item is not None for _, parameter in parameters),
    )


def _incoming(annotation: Any, title: str, what: str) -> StreamType | None:
    try:
        return incoming(annotation)
    except UsageError as error:
        raise UsageError(f"endpoint {title}: {what}: {error}") from error


def _result(annotation: Any, title: str, *, is_stream: bool) -> Any:
    """Return the type of an endpoint's result, or of the items that it yields."""
    stream = outgoing(annotation)
    if is_stream and stream is None and annotation is not Any:
        raise UsageError(f"endpoint {title}: it yields; expected AsyncIterator[...] as its result, got {annotation}")
    if stream is not None and not is_stream:
        raise UsageError(f"endpoint {title}: it is to return {annotation}, but does not yield; make it yield its items")
    return annotation if stream is None else stream.item


def _decode(parameter: EndpointParameter, argument: msgspec.Raw, payload: Buffer, streams: ServedStreams | None) -> Any:
    if parameter.item is not None:
        return _open_stream(parameter, argument, payload, streams)
    return parameter.decoder.decode_part(argument, payload, what=parameter.what)


def _open_stream(
    parameter: EndpointParameter, argument: msgspec.Raw, payload: Buffer, streams: ServedStreams | None
) -> Any:
    number = stream_number(argument)
    if number is None and parameter.is_optional:
        return parameter.decoder.decode_part(argument, payload, what=parameter.what)
    if number is None or parameter.item is None:
        raise UsageError(f"{parameter.what}: expected a stream, an asynchronous iterable")
    if streams is None:
        raise UsageError(f"{parameter.what}: a told message cannot bring a stream; ask")
    return streams.open(number, parameter.item, parameter.what)
