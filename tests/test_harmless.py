"""The text of others gives no orders to a terminal."""

from __future__ import annotations

import ast
import json
import random
import re
import traceback
from pathlib import Path

import msgspec
import pytest

from asyncpar.errors import AsyncparError, PeerLost, PeerTimeout, RemoteError, UsageError
from asyncpar.harmless import (
    RESET,
    HarmlessStream,
    harmless,
    harmless_bytes,
    harmless_json,
    harmless_line,
    harmless_values,
)
from tests.orders import COLOR, ORDERS, check_shown, left_in, planted

ROOT = Path(__file__).parent.parent / "asyncpar"


@pytest.mark.parametrize("name", ORDERS)
def test_no_order_is_left_and_no_word_is_lost(name: str) -> None:
    text = planted(ORDERS[name])
    check_shown(harmless(text))
    check_shown(harmless(text, colors=True), own=True)
    check_shown(harmless_line(text + "\n" + text))
    check_shown(harmless_bytes(text.encode()).decode())


def test_no_two_orders_together_make_another_one() -> None:
    for seed in range(2000):
        rng = random.Random(seed)
        parts = [*ORDERS.values(), COLOR, "x", "[2J", "]0;", "\\", "m"]
        text = "".join(rng.choices(parts, k=6))
        assert left_in(harmless(text)) == "", seed
        assert left_in(harmless(text, colors=True), own=True) == "", seed
        assert harmless(harmless(text)) == harmless(text)


def test_raw_bytes_of_eight_bits_are_replaced() -> None:
    assert harmless_bytes(b"a\x9b2Jb\xffc") == "a\ufffd2Jb\ufffdc".encode()


def test_names_that_are_no_text_are_spelt_out() -> None:
    assert harmless("a\udcffb") == "a\\udcffb"


def test_plain_text_of_all_languages_stays() -> None:
    text = "Grüße, 你好, שלום, 🙂\tcolumn\nline\n"
    assert harmless(text) == text
    assert harmless_line(" né e ") == " né e "


def test_colours_end_with_their_line() -> None:
    text = f"{COLOR}red\nplain\n{COLOR}red again{RESET}\n"
    assert harmless(text, colors=True) == f"{COLOR}red{RESET}\nplain\n{COLOR}red again{RESET}\n"
    assert harmless(text) == "red\nplain\nred again\n"


@pytest.mark.parametrize("seed", range(50))
def test_a_stream_is_harmless_wherever_it_is_cut(seed: int) -> None:
    rng = random.Random(seed)
    content = "".join(planted(order) + "é\n" for order in rng.sample([*ORDERS.values(), COLOR], k=12)).encode()
    whole = HarmlessStream(colors=True)
    at_once = whole.feed(content) + whole.feed(b"")
    stream, shown, rest = HarmlessStream(colors=True), b"", content
    while rest:
        count = rng.randint(1, 5)
        shown, rest = shown + stream.feed(rest[:count]), rest[count:]
        assert left_in(shown.decode(), own=True) == ""
    assert shown + stream.feed(b"") == at_once
    assert at_once.decode().count("before") == at_once.decode().count("after") == 12


def test_a_stream_holds_back_little() -> None:
    stream = HarmlessStream(colors=False)
    assert stream.feed(b"prompt> ") == b"prompt> "
    assert stream.feed(b"\x1b]0;" + b"x" * 100) == b""
    assert stream.feed(b"x" * 5000).endswith(b"xxx")


def test_the_text_of_errors_gives_no_orders() -> None:
    for order in ORDERS.values():
        text = planted(order)
        errors: list[AsyncparError] = [
            UsageError(text),
            PeerLost(text, rank=1, host=text, cause=text),
            PeerTimeout(text, rank=1),
            RemoteError(text, rank=1, type_name=text, remote_traceback=text),
        ]
        for error in errors:
            check_shown(str(error))
            check_shown("".join(traceback.format_exception(error)))


class Named(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    parts: tuple[str, ...] = ()
    count: int = 0


@pytest.mark.parametrize("name", [*ORDERS, "line feed"])
def test_values_are_harmless_and_keep_their_form(name: str) -> None:
    text = planted(ORDERS.get(name, "\n"))
    value = {"list": [Named(name=text, parts=(text,), count=3)], text: {"deep": text}, "none": None}
    clean = harmless_values(value)
    plain = harmless_line(text)
    assert clean == {"list": [Named(name=plain, parts=(plain,), count=3)], plain: {"deep": plain}, "none": None}
    document = harmless_json(msgspec.json.encode(value))
    assert left_in(document.decode()) == ""
    assert json.loads(document) == json.loads(msgspec.json.encode(value))


def test_values_without_orders_are_not_copied() -> None:
    value = {"a": ["Grüße", 1, None, 2.5, (True,)]}
    assert harmless_values(value) is value


SHOWING = {
    "launch/command_line.py": {"echo"},
    "launch/host_placement.py": {"sys.stderr.write"},
    "launch/trampoline.py": {"os.write"},
    "launch/display.py": {"os.write"},
    "launch/rank_process.py": {"os.write"},
    "launch/reaper_client.py": {"os.write"},
    "launch/post_mortem.py": {"os.write"},
    "launch/rank_run.py": {"os.write"},
}
"""Files that write by themselves: to a screen only through ``harmless``, the others to pipes and raw log files."""


def test_all_that_is_shown_goes_through_one_place() -> None:
    found = {}
    for folder in ("launch", "observe", "dashboard", "engines"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            source = path.read_text()
            if not re.search(r"print\(|echo\(|\.write\(", source):
                continue
            calls = [node.func for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
            names = {ast.unparse(call).removeprefix("click.") for call in calls}
            names &= {"print", "echo", "secho", "os.write", "sys.stdout.write", "sys.stderr.write"}
            if names:
                found[str(path.relative_to(ROOT))] = names
    assert found == SHOWING
