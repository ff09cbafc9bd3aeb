"""The garbage collector does not look through what lives to the end of the session."""

from __future__ import annotations

import gc

from tests.lasting import LastingObjects


def test_what_lives_on_is_looked_through_no_more() -> None:
    lasting = LastingObjects(every=2)
    kept: list[list[int]] = [[] for _ in range(10_000)]
    before = gc.get_freeze_count()
    lasting.count(is_module_over=True)
    lasting.count(is_module_over=False)
    assert gc.get_freeze_count() <= before
    lasting.count(is_module_over=True)
    assert gc.get_freeze_count() >= before + len(kept) // 2
