"""``dataclass`` for classes of this package: as that of the standard library, and defined in a fifth of the time.

The standard library compiles up to eight methods for each class, 0.6 ms; for the hundred classes that a node loads that
was a third of the time of the import.  Here ``__init__`` is compiled then, comparisons when they are first called, and
all classes share the other methods.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from reprlib import recursive_repr
from typing import TYPE_CHECKING, Any, TypeVar

T = TypeVar("T")

_FIELDS = "__dataclass_fields__"
_set = object.__setattr__


class _Factory:
    """The default of a parameter whose value a factory makes, shown in signatures as the standard library shows it."""

    def __repr__(self) -> str:
        return "<factory>"


_FACTORY = _Factory()


def _equals(self: Any, other: Any) -> Any:
    """Compile ``__eq__`` of the class of ``self`` when it is first called, in place of this one."""
    one, two = _compared(self, "self"), _compared(self, "other")
    body = f"return {one} == {two} if other.__class__ is self.__class__ else NotImplemented"
    return _replace(_equals, "__eq__", self, f"(self, other): {body}")(self, other)


def _hash(self: Any) -> int:
    """Compile ``__hash__`` as ``_equals`` does ``__eq__``."""
    compiled: Callable[..., int] = _replace(_hash, "__hash__", self, f"(self): return hash({_compared(self, 'self')})")
    return compiled(self)


def _compared(instance: Any, name: str) -> str:
    return "(" + "".join(f"{name}.{each.name}," for each in dataclasses.fields(instance) if each.compare) + ")"


def _replace(shared: Callable[..., Any], name: str, instance: Any, text: str) -> Callable[..., Any]:
    owner = next((kind for kind in type(instance).__mro__ if vars(kind).get(name) is shared), None)
    if owner is None:  # another thread has replaced it meanwhile
        present: Callable[..., Any] = getattr(type(instance), name)
        return present
    made: dict[str, Any] = {}
    exec(f"def {name}{text}", made)
    setattr(owner, name, made[name])
    compiled: Callable[..., Any] = made[name]
    return compiled


@recursive_repr()
def _repr(self: Any) -> str:
    shown = [f"{each.name}={getattr(self, each.name)!r}" for each in dataclasses.fields(self) if each.repr]
    return f"{type(self).__qualname__}({', '.join(shown)})"


def _refuse_set(self: Any, name: str, value: object) -> None:
    if _is_frozen(self, name):
        raise dataclasses.FrozenInstanceError(f"cannot assign to field {name!r}")
    _set(self, name, value)


def _refuse_delete(self: Any, name: str) -> None:
    if _is_frozen(self, name):
        raise dataclasses.FrozenInstanceError(f"cannot delete field {name!r}")
    object.__delattr__(self, name)


def _is_frozen(instance: Any, name: str) -> bool:
    """Only an ordinary subclass may have attributes of its own."""
    return name in instance.__dataclass_fields__ or _FIELDS in vars(type(instance))


def _state(self: Any) -> list[Any]:
    return [getattr(self, each.name) for each in dataclasses.fields(self)]


def _restore(self: Any, state: list[Any]) -> None:
    for each, value in zip(dataclasses.fields(self), state, strict=True):
        _set(self, each.name, value)


def _make_init(cls: Any, *, is_frozen: bool, has_slots: bool) -> Callable[..., None]:
    """Compile ``__init__`` with the signature that the standard library would give it."""
    known: dict[str, Any] = {"_set": _set, "_FACTORY": _FACTORY}
    positional: list[str] = []
    keywords: list[str] = []
    lines: list[str] = []
    for each in dataclasses.fields(cls):
        name, default, factory = each.name, f"_default_{each.name}", each.default_factory
        value, parameter = name, name
        if factory is not dataclasses.MISSING:
            known[default] = factory
            value = f"{default}() if {name} is _FACTORY else {name}" if each.init else f"{default}()"
            parameter = f"{name}=_FACTORY"
        elif each.default is not dataclasses.MISSING:
            known[default] = each.default
            parameter = f"{name}={default}"
            value = name if each.init else default
        if each.init:
            (keywords if each.kw_only else positional).append(parameter)
        elif factory is dataclasses.MISSING and (each.default is dataclasses.MISSING or not has_slots):
            continue
        lines.append(f"_set(self, {name!r}, {value})" if is_frozen else f"self.{name} = {value}")
    if hasattr(cls, "__post_init__"):
        lines.append("self.__post_init__()")
    parameters = ", ".join(["self", *positional, *(["*", *keywords] if keywords else [])])
    exec(f"def __init__({parameters}):\n " + "\n ".join(lines or ["pass"]), known)
    init: Callable[..., None] = known.pop("__init__")
    init.__qualname__ = f"{cls.__qualname__}.__init__"
    init.__annotations__ = {each.name: each.type for each in dataclasses.fields(cls) if each.init} | {"return": None}
    return init


def _define(cls: Any, *, eq: bool, frozen: bool, slots: bool, kw_only: bool) -> Any:
    own = vars(cls)
    has_init, has_repr, has_equals, has_hash = (
        name in own and own[name] is not None for name in ("__init__", "__repr__", "__eq__", "__hash__")
    )
    if cls.__doc__ is None:
        cls.__doc__ = cls.__name__  # else the standard library writes a signature, which takes long
    made: Any = dataclasses.dataclass(init=False, repr=False, eq=False, slots=slots, kw_only=kw_only)(cls)
    if not has_init:
        made.__init__ = _make_init(made, is_frozen=frozen, has_slots=slots)
    if not has_repr:
        made.__repr__ = _repr
    if eq:
        if not has_equals:
            made.__eq__ = _equals
        if not has_hash:
            made.__hash__ = _hash if frozen else None
    if frozen:
        made.__setattr__, made.__delattr__ = _refuse_set, _refuse_delete
        made.__dataclass_params__.frozen = True
        if slots and "__getstate__" not in own:
            made.__getstate__, made.__setstate__ = _state, _restore
    return made


if TYPE_CHECKING:
    from dataclasses import dataclass as dataclass
else:

    def dataclass(
        cls: type[T] | None = None,
        /,
        *,
        eq: bool = True,
        order: bool = False,
        frozen: bool = False,
        slots: bool = False,
        kw_only: bool = False,
    ) -> Any:
        """Make a dataclass.  One that inherits fields, or is to be ordered, is made by the standard library."""

        def define(kind: Any) -> Any:
            if order or any(_FIELDS in vars(base) for base in kind.__mro__[1:]):
                return dataclasses.dataclass(eq=eq, order=order, frozen=frozen, slots=slots, kw_only=kw_only)(kind)
            return _define(kind, eq=eq, frozen=frozen, slots=slots, kw_only=kw_only)

        return define if cls is None else define(cls)
