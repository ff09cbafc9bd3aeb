"""Pages of dashboards that agents and launchers serve, as tests read them."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from tests.launch.agents.agent_groups import AgentGroup, eventually
from tests.launch.test_launch_dashboard import ask, pictures

SHOWN = ("--dashboard=127.0.0.1:0",)
SPEAKING = "print('spoken by a rank', flush=True)\n"
Picture = dict[str, Any]


def url_of(group: AgentGroup, log: str) -> str:
    """Return the address of the page that was said in a log."""
    found: list[str] = []

    def is_shown() -> bool:
        found[:] = re.findall(r"the dashboard is at (http://\S+)", group.output(log))
        return bool(found)

    eventually(is_shown, "the address of the page")
    return found[0]


def see(url: str, is_so: Callable[[Picture], bool], what: str) -> Picture:
    """Return the first picture for which ``is_so``."""
    seen: Picture = {}
    for number, picture in enumerate(pictures(url)):
        if is_so(picture):
            return picture
        seen = picture
        assert number < 120, f"{what} never became so: {seen['sentence']} {seen['alarms']}"
    raise AssertionError(f"{what}: the page ended before: {seen.get('ended')}")


def hosts_of(picture: Picture) -> dict[int, str]:
    return {row["rank"]: row["host"] for row in picture["ranks"]}


def shows_both(picture: Picture) -> bool:
    return picture["world"] == 2 and set(hosts_of(picture).values()) == {"one", "two"} and len(picture["ranks"]) == 2


def spoken(url: str) -> int:
    """Return how many ranks have said something on the page."""
    return [line["text"] for line in ask(url, "lines")].count("spoken by a rank")
