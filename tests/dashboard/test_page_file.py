"""The page as a file: small, and whole in itself."""

from __future__ import annotations

from asyncpar.dashboard.page_file import live_page, report_page


def test_the_page_is_light_and_names_no_other_place() -> None:
    page = live_page().html

    assert len(page.encode()) <= 300_000
    assert "uPlot" in page
    assert "Permission is hereby granted" in page  # uPlot's licence
    assert "unsafe" not in live_page().policy
    assert 'src="' not in page
    assert report_page({"picture": None, "lines": []}).count("<script>") == page.count("<script>")
