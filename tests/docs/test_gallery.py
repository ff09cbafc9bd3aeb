"""The gallery shows every example, by commands that are real, with pictures that are small."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import pytest

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
EXAMPLES = ROOT / "scripts" / "examples"
PAGE = (DOCS / "gallery.md").read_text()
OTHERS_OF_ENGINES = {"dask_cluster", "kubernetes_pods", "language_model", "ranks", "ray_cluster", "slurm_job"}


@pytest.fixture
def gallery(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(DOCS))
    return __import__("gallery_pictures")


def test_every_example_has_a_card_and_its_source() -> None:
    cards = re.findall(r"^\.\. example:: (\S+)$", PAGE, re.MULTILINE)
    assert [name for name in cards if not (EXAMPLES / name).is_file()] == []
    examples = {path.relative_to(EXAMPLES).as_posix() for path in EXAMPLES.rglob("*.py")}
    assert {Path(name).stem for name in examples - set(cards)} == OTHERS_OF_ENGINES
    sources = re.search(r"^\.\. example-sources:: (.*)$", PAGE, re.MULTILINE)
    assert sources is not None
    assert sources[1].split() == cards


def test_every_picture_is_there_small_and_drawn_by_the_script(gallery: Any) -> None:
    pictures = re.findall(r":picture: (\S+)|\]\((\S+\.png)\)", PAGE)
    shown = {name or other for name, other in pictures}
    assert [name for name in shown if not (DOCS / name).is_file()] == []
    drawn = sorted((DOCS / "gallery").glob("*.svg"))
    assert [path.stem for path in drawn] == sorted(gallery.RUNS)
    assert {f"gallery/{path.name}" for path in drawn} <= shown
    for path in drawn:
        assert path.stat().st_size < 6_000
        assert ET.parse(path).getroot().tag.endswith("svg")  # our own picture


def test_a_terminal_shows_the_command_and_cuts_what_is_long(gallery: Any) -> None:
    picture = gallery.draw_terminal("python x.py <a>", "\n".join(["=" * 40, "y" * 200, *map(str, range(40))]))
    texts = [each.text or "" for each in ET.fromstring(picture).iter() if each.tag.endswith("text")]
    assert texts[0] == "$ python x.py <a>"
    assert texts[1] == "y" * (gallery.COLUMNS - 1) + "…"
    assert texts[-1] == "…"
    assert len(texts) == 1 + gallery.ROWS


def test_a_curve_has_a_point_for_each_loss_and_needs_some(gallery: Any) -> None:
    picture = gallery.draw_curve("python x.py", "step 0: loss 4.0\nstep 5: loss 2.0\nstep 10: loss 1.0\n")
    assert picture.count("<circle") == 3
    assert "loss over steps: x.py" in picture
    with pytest.raises(ValueError, match="expected a loss in three lines"):
        gallery.draw_curve("python x.py", "step 0: loss 4.0\n")
