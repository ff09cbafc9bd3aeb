"""``--quick``: an answer in two minutes on two processors, and at its end a list of what was left out.

It runs one case of each test that neither starts processes nor takes long.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

LONG = (
    "tests/actors/meshes/test_groups.py",
    "tests/actors/runtime/test_blocked.py",
    "tests/actors/runtime/test_gateway.py",
    "tests/actors/runtime/test_semantics.py",
    "tests/actors/runtime/test_stream_chaos.py",
    "tests/actors/runtime/test_streams.py::test_a_hundred_thousand_items_arrive_in_order",
    "tests/actors/supervision/test_machine_states.py",
    "tests/backends/test_mpi_progress.py",
    "tests/backends/test_nccl.py::test_all_ranks_of_a_job_learn_which_rank_has_no_nccl",
    "tests/bench/test_plot.py",
    "tests/bench/test_simulation_script.py",
    "tests/checkpoint/test_deaths.py",
    "tests/checkpoint/test_failing_ranks.py",
    "tests/checkpoint/test_plain.py::test_what_is_kept_comes_back_as_it_was",
    "tests/checkpoint/test_round_trips.py",
    "tests/collectives/shared_memory/test_hierarchical.py",
    "tests/collectives/shared_memory/test_keyed.py",
    "tests/collectives/shared_memory/test_operations.py",
    "tests/collectives/test_closed_groups.py::test_memory_stays_the_same_over_many_groups",
    "tests/collectives/test_conformance.py::TestArenaWithoutPolling",
    "tests/collectives/test_conformance.py::TestGrpc",
    "tests/collectives/test_conformance.py::TestShm",
    "tests/collectives/test_conformance.py::TestSmallArena",
    "tests/collectives/test_conformance.py::TestTcp",
    "tests/collectives/test_ledger.py::test_very_many_keys_take_twelve_bytes_each",
    "tests/collectives/test_parts.py",
    "tests/collectives/test_ranks_that_differ.py",
    "tests/collectives/test_timeouts.py::test_many_operations_that_wait_cost_each_other_nothing",
    "tests/collectives/test_wait_notices.py::test_a_thousand_waits_are_looked_at_with_rests_and_reported_in_few_words",
    "tests/core/observe/test_loop_watch.py",
    "tests/device/test_agreement.py",
    "tests/device/test_failing.py",
    "tests/device/test_messages.py",
    "tests/elasticity/test_different_hosts.py",
    "tests/elasticity/test_healing.py",
    "tests/elasticity/test_job.py",
    "tests/gradsync/test_arena.py",
    "tests/gradsync/test_hangs.py",
    "tests/gradsync/test_lossy.py",
    "tests/hostile/test_collectives.py",
    "tests/hostile/test_faults.py",
    "tests/hostile/test_frames.py",
    "tests/hostile/test_listeners.py",
    "tests/hostile/test_payloads.py::test_a_hundred_thousand_mutations_are_values_or_documented_errors",
    "tests/hostile/test_random_frames.py",
    "tests/hybrid/test_checkpoints.py",
    "tests/hybrid/test_equality.py",
    "tests/hybrid/test_failures.py",
    "tests/hybrid/test_frozen.py",
    "tests/hybrid/test_precision.py",
    "tests/hybrid/test_resuming.py",
    "tests/hybrid/test_update_config.py",
    "tests/launch/agents/test_simulation.py",
    "tests/launch/test_doctor.py",
    "tests/launch/test_plan_command.py",
    "tests/launch/test_post_mortem.py",
    "tests/launch/test_reconnect.py",
    "tests/net/arena/test_formation.py",
    "tests/hosts/test_consensus.py::test_a_disk_that_forgets_is_found",
    "tests/hosts/test_consensus.py::test_a_missing_safeguard_is_found",
    "tests/net/transport/test_connection_watch.py",
    "tests/net/transport/test_conversations.py",
    "tests/net/transport/test_lanes.py::TestGrpcLaneOnUvloop",
    "tests/net/transport/test_lanes.py::TestStripedLane",
    "tests/net/transport/test_lanes.py::TestTcpLaneOnUvloop",
    "tests/net/transport/test_lanes.py::TestUnixLaneOnUvloop",
    "tests/net/transport/test_negotiation.py",
    "tests/net/wire/test_typed_values.py::test_a_list_that_holds_itself_often_is_refused",
    "tests/nn/test_memory.py",
    "tests/observe/test_step_rounds.py",
    "tests/options/test_every_option.py",
    "tests/pipeline/orders/test_orders.py",
    "tests/testing/simulation/test_elastic.py",
    "tests/testing/simulation/test_pauses.py",
    "tests/testing/simulation/test_safeguards.py",
    "tests/train/test_modes_of_training.py",
    "tests/world/test_shrinking_world.py",
    "tests/world/test_stale_frames.py::test_a_rank_that_wakes_in_the_next_world_disturbs_nobody",
)
"""What takes long without processes of its own: beginnings of names of tests."""

MORE, PROCESSES, TIME = "further cases of tests that ran", "tests that start processes", "tests that take long"
KEY = "left_out_by_quick"
left_out: Counter[tuple[str, str]] = Counter()
"""Tests by why they are left out and where they are; with xdist, what a worker reported."""


def add_option(parser: pytest.Parser) -> None:
    parser.addoption("--quick", action="store_true", help="run one case of each test that takes no time to speak of")


def leave_out(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("quick"):
        return
    reasons = list(_reasons(items))
    chosen = [item for item, reason in zip(items, reasons, strict=True) if reason is None]
    others = [(item, reason) for item, reason in zip(items, reasons, strict=True) if reason is not None]
    left_out.update((reason, item.nodeid.rpartition("::")[0].rpartition("/")[0]) for item, reason in others)
    config.hook.pytest_deselected(items=[item for item, _ in others])
    items[:] = chosen


def _reasons(items: list[pytest.Item]) -> Iterator[str | None]:
    """Say of each test why it is left out, or None."""
    seen: set[str] = set()
    for item in items:
        name = item.nodeid.partition("[")[0]
        if item.get_closest_marker("process") is not None:
            yield PROCESSES
        elif name.startswith(LONG):
            yield TIME
        else:
            yield MORE if name in seen else None
        seen.add(name)


def pytest_sessionfinish(session: pytest.Session) -> None:
    reported = getattr(session.config, "workeroutput", None)
    if reported is not None:
        reported[KEY] = [[*where, count] for where, count in left_out.items()]


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Hear from a worker what all of them left out."""
    reported = getattr(node, "workeroutput", {}).get(KEY, [])
    left_out.update({(reason, folder): count for reason, folder, count in reported if (reason, folder) not in left_out})


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if not left_out:
        return
    terminalreporter.section("left out by --quick")
    for reason in (MORE, PROCESSES, TIME):
        folders = {folder: count for (why, folder), count in sorted(left_out.items()) if why == reason}
        where = ", ".join(f"{folder} {count}" for folder, count in folders.items())
        terminalreporter.write_line(f"{sum(folders.values())} {reason}: {where or 'none'}")
    terminalreporter.write_line(f"what takes long: {', '.join(LONG)}")
