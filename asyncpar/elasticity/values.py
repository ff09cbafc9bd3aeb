"""Values of a state that are not arrays: plain data, random streams, and objects with a state of their own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from asyncpar.core.config.placement import is_frozen
from asyncpar.elasticity.plain import decode_plain, encode_plain
from asyncpar.elasticity.sharded_optimizer import ShardedOptimizer
from asyncpar.errors import UsageError
from asyncpar.nn.optimizers import Optimizer

UPDATE = "arguments of update"

_PAIRS = (("state", "restore"), ("state_dict", "load_state_dict"))


@dataclass(frozen=True, slots=True)
class PlainField:
    """One value of a state, with functions to read and to restore it."""

    name: str
    read: Callable[[], object]
    write: Callable[[Any], object]

    def encoded(self) -> bytes:
        """Return the value as canonical bytes.  Raises ``UsageError`` naming it if it is not plain."""
        return encode_plain(self.read(), self.name)

    def restore(self, content: bytes) -> None:
        """Restore the value that ``encoded`` returned."""
        self.write(decode_plain(content))


def rng_field(name: str, rng: object) -> PlainField:
    """Return the state of a numpy Generator as a field."""
    if not isinstance(rng, np.random.Generator):
        raise UsageError(f"{name}: expected a numpy Generator, such as np.random.default_rng(7), got {type(rng)!r}")
    generator = rng.bit_generator

    def write(value: Any) -> None:
        generator.state = value

    return PlainField(name, lambda: dict(generator.state), write)


def optimizer_field(name: str, optimizer: Optimizer) -> PlainField:
    """Return the state of an optimizer besides arrays, as a field.

    That is the number of its steps, the factor of the next one, and how many steps which parameters have skipped.
    """

    def write(value: Any) -> None:
        optimizer.step_count, optimizer.factor, optimizer.skipped = value

    return PlainField(name, lambda: [optimizer.step_count, optimizer.factor, optimizer.skipped], write)


def frozen_field(name: str, optimizer: Optimizer) -> PlainField:
    """Return the names of the frozen parameters of an optimizer, as a field."""

    def write(names: Any) -> None:
        for parameter in optimizer.parameters:
            is_trained = parameter.name not in names
            if parameter.requires_grad is not is_trained:
                parameter.requires_grad = is_trained

    return PlainField(
        name, lambda: [parameter.name for parameter in optimizer.parameters if is_frozen(parameter)], write
    )


def arguments_field(sharded: ShardedOptimizer) -> PlainField:
    """Return the arguments of the last update of a sharded optimizer, as the field ``UPDATE``."""

    def write(value: Any) -> None:
        sharded.arguments = value

    return PlainField(UPDATE, lambda: sharded.arguments, write)


def extra_field(name: str, values: dict[str, Any]) -> PlainField:
    """Return the field of ``values[name]``.  Lists and dicts stay the same objects when they are restored.

    Raises ``UsageError`` naming the value if it is neither plain nor an object with methods for its state.
    """
    value = values[name]
    if isinstance(value, np.random.Generator):
        return rng_field(name, value)
    for give, take in _PAIRS:
        if callable(getattr(value, give, None)) and callable(getattr(value, take, None)):
            field = PlainField(name, getattr(value, give), getattr(value, take))
            field.encoded()
            return field

    def write(restored: Any) -> None:
        present = values[name]
        if isinstance(present, dict) and isinstance(restored, dict):
            present.clear()
            present.update(restored)
        elif isinstance(present, list) and isinstance(restored, list):
            present[:] = restored
        else:
            values[name] = restored

    field = PlainField(name, lambda: values[name], write)
    field.encoded()
    return field


def encode_all(fields: Mapping[str, PlainField]) -> dict[str, bytes]:
    """Return the encoded value of each of ``fields``."""
    return {name: field.encoded() for name, field in fields.items()}
