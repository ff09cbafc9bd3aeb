"""Encode a function for its ranks, and its result for the caller.

A function of a module travels by name, and its arguments as plain data and arrays: no code travels.  Anything else is
sent by cloudpickle, if the caller consents (``pickle=True``); then results may be pickled, too.
"""

from __future__ import annotations

import functools
import importlib
import runpy
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from asyncpar.errors import UsageError
from asyncpar.net.wire.payload import decode_payload, encode_payload

_MAIN = "__asyncpar_main__"
"""The name under which ranks import the caller's script, so its ``__main__`` part does not run."""
_PLAIN, _PICKLED = b"d", b"p"


class FunctionCall(msgspec.Struct, frozen=True, kw_only=True):
    """A function with its arguments: by ``name``, or ``pickled``.

    ``script`` is the file of a function of ``__main__``; ``may_pickle``: results may be pickled.
    """

    name: str = ""
    script: str = ""
    arguments: bytes = b""
    pickled: bytes = b""
    may_pickle: bool = False


def encode_call(function: Callable[..., Any], arguments: tuple[Any, ...], *, pickle: bool) -> bytes:
    """Encode the call.  Raises ``UsageError`` that names the part that cannot travel, and the remedy."""
    if not callable(function):
        raise UsageError(f"fn: expected a function, got {function!r}")
    if pickle:
        return msgspec.msgpack.encode(
            FunctionCall(name=_name(function), pickled=_pickle((function, arguments), "fn"), may_pickle=True)
        )
    keywords: dict[str, Any] = {}
    while isinstance(function, functools.partial):
        arguments, keywords = (*function.args, *arguments), {**function.keywords, **keywords}
        function = function.func
    name, script = _find_name(function, "fn")
    try:
        encoded = bytes(encode_payload([list(arguments), keywords], what="the arguments"))
    except UsageError as error:
        raise UsageError(f"{error}; pickle=True lets it travel as code, which its receivers run") from error
    return msgspec.msgpack.encode(FunctionCall(name=name, script=script, arguments=encoded))


def _name(function: Callable[..., Any]) -> str:
    """Return the name of a function that travels as code, for messages."""
    while isinstance(function, functools.partial):
        function = function.func
    return str(getattr(function, "__name__", "fn"))


def describe_object(found: Any, what: str, *, pickle: bool) -> FunctionCall:
    """Describe a class to other processes: by name if that is possible, otherwise as code if ``pickle``.

    Raises ``UsageError``.
    """
    try:
        name, script = _find_name(found, what)
    except UsageError:
        if not pickle:
            raise
        return FunctionCall(pickled=_pickle(found, what))
    return FunctionCall(name=name, script=script)


def find_object(call: FunctionCall) -> Any:
    """Return the object that ``describe_object`` has described.  Raises ``UsageError`` if its module is missing."""
    with _explaining_imports("actor class"):
        return _unpickle(call.pickled) if call.pickled else _find_function(call)


def _find_name(function: Any, what: str) -> tuple[str, str]:
    """Return ``module:qualified name``, and the script if the module is ``__main__``."""
    module, name = getattr(function, "__module__", None), getattr(function, "__qualname__", "")
    found: Any = sys.modules.get(module or "")
    for part in name.split("."):
        found = getattr(found, part, None)
    if found is not function:
        raise UsageError(
            f"{what}: {name or function!r} is not found by its name in {module}, as lambdas and functions in functions "
            "are not; move it to the top of a module, or pass pickle=True, which lets it travel as code"
        )
    if module != "__main__":
        return f"{module}:{name}", ""
    script = getattr(sys.modules["__main__"], "__file__", None)
    if script is None:
        raise UsageError(
            f"{what}: {name} was defined in a notebook or at a prompt, where its ranks cannot import it; pass "
            "pickle=True, which lets it travel as code, or move it to a module"
        )
    return f"{_MAIN}:{name}", str(Path(script).absolute())


def decode_call(encoded: bytes) -> tuple[Callable[..., Any], list[Any], dict[str, Any], bool]:
    """Return the function, its arguments, and whether its result may be pickled.

    Raises ``UsageError`` if this process lacks a module that it needs.
    """
    call = msgspec.msgpack.decode(encoded, type=FunctionCall)
    with _explaining_imports("fn"):
        if call.pickled:
            function, arguments = _unpickle(call.pickled)
            return function, list(arguments), {}, call.may_pickle
        function = _find_function(call)
    arguments, keywords = decode_payload(call.arguments)
    return function, list(arguments), dict(keywords), call.may_pickle


@contextmanager
def _explaining_imports(what: str) -> Iterator[None]:
    try:
        yield
    except (ImportError, AttributeError) as error:
        raise UsageError(
            f"{what}: this rank cannot load it: {error} (with {sys.executable}, sys.path {sys.path[:4]}); install the "
            "module where ranks run, or cloudpickle.register_pickle_by_value(module) and pickle=True"
        ) from error


def _find_function(call: FunctionCall) -> Callable[..., Any]:
    module, _, name = call.name.partition(":")
    if call.script and module not in sys.modules:
        space = runpy.run_path(call.script, run_name=_MAIN)
        holder = type(sys)(_MAIN)
        holder.__dict__.update(space)
        sys.modules[_MAIN] = holder
    found: Any = importlib.import_module(module)
    for part in name.split("."):
        found = getattr(found, part)
    function: Callable[..., Any] = found
    return function


def encode_value(value: object, *, may_pickle: bool) -> bytes:
    """Encode the result of a rank.  Raises ``UsageError`` if it cannot travel."""
    try:
        return _PLAIN + bytes(encode_payload(value, what="the result"))
    except UsageError as error:
        if not may_pickle:
            raise UsageError(f"{error}; return plain data and arrays, or pass pickle=True") from error
    return _PICKLED + _pickle(value, "the result")


def decode_value(encoded: bytes) -> Any:
    """Decode a result of ``encode_value``."""
    if encoded[:1] == _PICKLED:
        return _unpickle(encoded[1:])
    return decode_payload(memoryview(encoded)[1:].tobytes())


def encode_error(error: BaseException) -> bytes | None:
    """Pickle ``error`` without its traceback; None if that is impossible."""
    try:
        pickled = _pickle(error, "error")
        _unpickle(pickled)
    except Exception:  # noqa: BLE001  # code of the user's class; then there is its text
        return None
    return pickled


def decode_error(pickled: bytes) -> BaseException | None:
    """Decode an exception of ``encode_error``; None if its class is not known here."""
    try:
        error = _unpickle(pickled)
    except Exception:  # noqa: BLE001  # as above
        return None
    return error if isinstance(error, BaseException) else None


def name_of(encoded: bytes) -> str:
    """Return the name of the function of an encoded call, for messages."""
    call = msgspec.msgpack.decode(encoded, type=FunctionCall)
    return call.name.rpartition(":")[2] or "fn"


def _pickle(value: object, what: str) -> bytes:
    try:
        import cloudpickle
    except ImportError as error:
        raise UsageError("pickle: expected cloudpickle; pip install 'asyncpar[engines]'") from error
    try:
        pickled: bytes = cloudpickle.dumps(value)
    except Exception as error:
        raise UsageError(f"{what}: it cannot be pickled: {type(error).__name__}: {error}") from error
    return pickled


def _unpickle(pickled: bytes) -> Any:
    import pickle

    return pickle.loads(pickled)  # sent by the caller, or returned by its own ranks
