"""The arguments of a call that goes to many actors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

import msgspec

from asyncpar.wire.payload import PayloadEncoder


class EncodedArguments(tuple[Any, ...]):
    """Positional arguments that have been encoded, together with the named ones, for any number of calls."""

    encoder: PayloadEncoder
    positional: list[msgspec.Raw]
    named: dict[str, msgspec.Raw]

    @classmethod
    def of(
        cls,
        arguments: Sequence[Any],
        encoder: PayloadEncoder,
        positional: list[msgspec.Raw],
        named: dict[str, msgspec.Raw],
    ) -> Self:
        """Return ``arguments`` with what ``encoder`` made of them and of the named ones."""
        encoded = cls(arguments)
        encoded.encoder, encoded.positional, encoded.named = encoder, positional, named
        return encoded
