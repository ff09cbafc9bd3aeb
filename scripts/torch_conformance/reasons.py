"""Why asyncpar does not pass some tests that Gloo passes: what is known, by the test's name.

A reason says what torch fixes to Gloo's name or form, never that something is broken: what is broken is fixed.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

REASONS: Mapping[str, str] = MappingProxyType({})
