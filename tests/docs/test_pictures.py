"""The pictures of the site show what plans and simulated runs say."""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

DOCS = Path(__file__).resolve().parents[2] / "docs"


@pytest.fixture
def draw(monkeypatch: pytest.MonkeyPatch) -> object:
    monkeypatch.syspath_prepend(str(DOCS))
    return __import__("pictures")


def hints(picture: str) -> list[str]:
    return [each.text or "" for each in ET.fromstring(picture).iter("title")]  # our own picture


def test_all_buckets_of_a_step_are_drawn_behind_the_layers_that_they_wait_for(draw: object) -> None:
    picture = draw.draw_buckets(4, 2, 2)  # type: ignore[attr-defined]  # a module of the site
    times = {
        name: (float(begun), float(ended))
        for name, begun, ended in re.findall(r"(\w+ \d): ([0-9.]+) ms to ([0-9.]+) ms", picture)
    }
    assert [name for name in times if name.startswith("bucket")] == ["bucket 0", "bucket 1", "bucket 2"]
    for bucket, layer in (("bucket 0", "layer 3"), ("bucket 1", "layer 1"), ("bucket 2", "layer 0")):
        assert times[bucket][0] >= times[layer][1] - 0.1
    assert len(hints(picture)) == 4 + 3
    assert draw.draw_buckets(4, 2, 2) == picture  # type: ignore[attr-defined]  # virtual time: every run is the same


def test_every_lane_of_an_all_reduce_over_hosts_is_drawn_once(draw: object) -> None:
    picture = draw.draw_topology(2, 2, 2)  # type: ignore[attr-defined]  # a module of the site
    kinds = [re.sub(r".*, (.*):.*", r"\1", hint) for hint in hints(picture)]
    assert (kinds.count("shared memory"), kinds.count("TCP"), len(kinds)) == (3, 6, 9)
    assert "sends 1.33 times the array" in picture  # 2 (hosts - 1) / hosts
