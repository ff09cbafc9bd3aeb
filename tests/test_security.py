"""The limits in SECURITY.md are true."""

import importlib
import re
from pathlib import Path

TEXT = (Path(__file__).resolve().parent.parent / "SECURITY.md").read_text()
CONSTANTS = re.findall(r"`([\w.]+):(\w+) = ([\d.]+)`", TEXT)


def test_every_constant_that_it_names_has_the_value_that_it_states() -> None:
    assert len(CONSTANTS) > 8
    stated = {f"{module}:{name}": float(value) for module, name, value in CONSTANTS}
    actual = {
        f"{module}:{name}": float(getattr(importlib.import_module(module), name)) for module, name, _ in CONSTANTS
    }
    assert actual == stated


def test_it_promises_no_address_to_write_to() -> None:
    assert "@" not in TEXT
    assert "advisories" in TEXT
