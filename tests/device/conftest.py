"""Quick links and routes for tests on the fake: links know at once who is lost, and a route shows at once."""

from __future__ import annotations

import pytest

from asyncpar.collectives.device import channel, route


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wait less for what never comes."""
    monkeypatch.setattr(channel, "GRACE", 0.1)
    monkeypatch.setattr(route, "_LONGEST", 0.25)
