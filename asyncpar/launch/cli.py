"""The command line ``asyncpar``: `launch`, and the commands of other modules, imported on use."""

from __future__ import annotations

import importlib
import os
from collections.abc import Mapping
from typing import Any

import click

from asyncpar.core.addresses import join_address, loopback, spell_host
from asyncpar.core.config.environment import ELASTIC_PIPE, LaunchEnvironment
from asyncpar.errors import UsageError
from asyncpar.launch.command_line import (
    OneLineCommand,
    UncutGroup,
    exit_with,
    observer_options,
    option,
    parse_observers,
)
from asyncpar.launch.options import (
    BACKENDS,
    LaunchOptions,
    parse_conf,
    parse_count,
    parse_kind,
    parse_limit,
    parse_nnodes,
    parse_nproc,
    parse_seconds,
    parse_streams,
)

_ELSEWHERE = {
    "agent": "asyncpar.launch.agents.commands",
    "bench": "asyncpar.launch.bench",
    "certs": "asyncpar.launch.certs",
    "doctor": "asyncpar.launch.commands.doctor",
    "drain": "asyncpar.launch.agents.commands",
    "flight": "asyncpar.launch.commands.flight",
    "k8s": "asyncpar.launch.commands.k8s",
    "logs": "asyncpar.launch.commands.logs",
    "plan": "asyncpar.launch.layouts",
    "report": "asyncpar.launch.commands.report",
    "slurm": "asyncpar.launch.commands.slurm",
    "stacks": "asyncpar.launch.commands.stacks",
    "status": "asyncpar.launch.commands.status",
    "top": "asyncpar.launch.commands.top",
    "trace": "asyncpar.launch.commands.trace",
}


_GROUPS = {
    "Start": ("launch", "agent", "drain", "slurm", "k8s", "certs", "plan"),
    "See": ("status", "top", "stacks", "logs", "trace", "flight", "report"),
    "Check and measure": ("doctor", "bench"),
}


class _Commands(UncutGroup):
    """Imports the module of a command on use, so a launch does not wait for imports that it does not need."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted([*super().list_commands(ctx), *_ELSEWHERE])

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the commands in groups, in the order of use."""
        names = self.list_commands(ctx)
        listed = {title: [name for name in group if name in names] for title, group in _GROUPS.items()}
        listed["Other"] = [name for name in names if not any(name in group for group in listed.values())]
        for title, group in listed.items():
            self.write_commands(ctx, formatter, title, group)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _ELSEWHERE:
            return super().get_command(ctx, cmd_name)
        command: click.Command = getattr(importlib.import_module(_ELSEWHERE[cmd_name]), cmd_name)
        return command


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 80})
@click.version_option(package_name="asyncpar", prog_name="asyncpar")
def main() -> None:
    """Collectives, actors and parallel training as coroutines."""


_LAUNCH = {"allow_interspersed_args": False, "auto_envvar_prefix": "PET"}
"""As under torchrun, ``PET_NNODES=2`` stands for ``--nnodes 2``; Kubeflow's Trainer sets such variables."""


@main.command(cls=OneLineCommand, context_settings=_LAUNCH)
@option("--nproc-per-node", metavar="N", default="1", help="Ranks on this host; 'auto' or 'cpu': one per core.  [1]")
@option("--nnodes", metavar="N", default="1", help="Number of hosts, or MIN:MAX: hosts may come and go.  [1]")
@option("--node-rank", metavar="N", default=None, help="Place of this host; 0 is the one at the endpoint.")
@option("--rdzv-endpoint", metavar="HOST:PORT", default=None, help="Where the first host's agent serves the others.")
@option("--master-addr", metavar="HOST", default=None, help="Host of the endpoint, as in --rdzv-endpoint.")
@option("--master-port", metavar="PORT", default=None, help="Port of the endpoint, as in --rdzv-endpoint.")
@option("--rdzv-id", metavar="NAME", default=None, help="Name of the job; agents of other jobs are refused.")
@option("--rdzv-backend", metavar="NAME", default="asyncpar", help="asyncpar; c10d and static mean the same.")
@option("--rdzv-conf", metavar="K=V,...", default="", help="timeout=SECONDS, as --rdzv-timeout.")
@option("--rdzv-timeout", metavar="SECONDS", default=None, help="How long to wait for hosts and ranks.  [300]")
@option("--standalone", is_flag=True, help="One host, any free port, whatever the endpoint says.")
@option("--local-addr", metavar="ADDRESS", default=None, help="Address of this host that its ranks bind to.")
@option("--secret-file", metavar="FILE", default=None, envvar="ASYNCPAR_SECRET_FILE", help="The job's secret.")
@option("--certs", metavar="DIR", default=None, envvar="ASYNCPAR_CERTS", help="From `asyncpar certs init`: use TLS.")
@option(
    "--transport",
    metavar="NAME",
    default=None,
    envvar="ASYNCPAR_TRANSPORT",
    help="Pin the lane: shm, tcp, grpc, package.module:NAME.",
)
@option("--last-call", metavar="SECONDS", default=None, help="Wait for more than MIN hosts before the start.  [5]")
@option("--elastic", metavar="HOW", default="restart", help="Hosts come or go: restart ranks, or ranks live on.")
@option("--max-restarts", metavar="N", default="0", help="Start all ranks again after a failure, N times.  [0]")
@option("--restart-window", metavar="SECONDS", default=None, help="Restarts within it count.  [all; ranks: 3600]")
@option("--on-total-loss", metavar="HOW", default=None, help="All ranks lost: checkpoint (default), restart, fail.")
@option("--spares", metavar="N", default="0", help="Processes of each host that wait to step in (--elastic ranks).")
@option("--host-name", metavar="NAME", default=None, help="What this host is called where hosts come and go.")
@option("--grace-period", metavar="SECONDS", default="10", help="From asking ranks to end until SIGKILL.  [10]")
@option("--reconnect-within", metavar="SECONDS", default="5", help="How long hosts may lose each other's agents.  [5]")
@option("--silent-after", metavar="SECONDS", default=None, help="End when a rank is hung or stopped so long.  [off]")
@option("--stopped-after", metavar="SECONDS", default=None, help="The same for one that is stopped (SIGSTOP).  [off]")
@option("--busy-after", metavar="SECONDS", default=None, help="The same for one that computes in one C call.  [off]")
@option("--log-dir", metavar="DIR", default=None, help="Keep all output: DIR/attempt_N/RANK/stdout.log, stderr.log.")
@option("--post-mortem", metavar="DIR", default=None, help="After a failure, what happened is in a folder there.")
@option("--redirects", "-r", metavar="STREAMS", default="0", help="To files only: 1 stdout, 2 stderr, 3 both.")
@option("--tee", "-t", metavar="STREAMS", default="0", help="To files too (--log-dir does, without -r).")
@option("--full-traceback", is_flag=True, help="Show all frames of a failure, asyncpar's and asyncio's, too.")
@observer_options
@option("--start-method", metavar="NAME", default="spawn", help="Only spawn.")
@option("--monitor-interval", metavar="SECONDS", default=None, help="Accepted; nothing here polls.")
@option("--module", "-m", is_flag=True, help="PROGRAM is a Python module.")
@option("--no-python", is_flag=True, help="PROGRAM is executed as it is.")
@click.argument("program")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def launch(program: str, arguments: tuple[str, ...], **given: Any) -> None:
    """Run PROGRAM, a Python script, in many processes that make one world.

    Options go before PROGRAM, its own ARGUMENTS after it.  On several hosts,
    run the same command on each.  Exits with the code of the rank that failed
    first (128 + N for signal N), and leaves no process behind.
    """
    exit_with("launch", lambda: _run(_options(program, arguments, given)))


def _run(options: LaunchOptions) -> int:
    """Import slow modules late, so mistakes in options are reported at once."""
    environment = dict(os.environ)
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # errors that matter are raised as exceptions
    if options.is_for_agents:
        from asyncpar.launch.agents.submission import run_submission

        return run_submission(options, environment)
    from asyncpar.launch.run import run_launch

    return run_launch(options, environment)


def _options(program: str, arguments: tuple[str, ...], given: dict[str, Any]) -> LaunchOptions:
    kind = parse_kind(is_module=given["module"], is_executed=given["no_python"])
    if given["rdzv_backend"] not in BACKENDS:
        raise UsageError(f"--rdzv-backend: expected one of {', '.join(BACKENDS)}, got {given['rdzv_backend']!r}")
    if given["start_method"] != "spawn":
        raise UsageError(f"--start-method: expected spawn, got {given['start_method']!r}")
    least, nnodes = parse_nnodes(given["nnodes"])
    if given["standalone"] and nnodes > 1:
        raise UsageError(f"--standalone: expected with one host, got --nnodes {nnodes}")
    node_rank = given["node_rank"]
    return LaunchOptions(
        program=program,
        arguments=arguments,
        kind=kind,
        nnodes=nnodes,
        least_nnodes=least,
        last_call=_last_call(given["last_call"], is_range=least is not None),
        node_rank=None if node_rank is None else parse_count("--node-rank", node_rank),
        nproc=parse_nproc(given["nproc_per_node"]),
        endpoint=None if given["standalone"] else _endpoint(given),
        job=given["rdzv_id"] or None,
        timeout=_timeout(given),
        max_restarts=parse_count("--max-restarts", given["max_restarts"]),
        grace=parse_seconds("--grace-period", given["grace_period"]),
        reconnect=parse_seconds("--reconnect-within", given["reconnect_within"]),
        silent_after=parse_limit("--silent-after", given["silent_after"]),
        stopped_after=parse_limit("--stopped-after", given["stopped_after"]),
        busy_after=parse_limit("--busy-after", given["busy_after"]),
        log_dir=given["log_dir"],
        redirects=parse_streams("--redirects", given["redirects"]),
        tee=parse_streams("--tee", given["tee"]),
        local_addr=given["local_addr"] or _own_address(os.environ),
        transport=given["transport"],
        secret_file=given["secret_file"],
        certs=given["certs"] or None,
        elastic=given["elastic"],
        restart_window=_window(given["restart_window"]),
        on_total_loss=given["on_total_loss"],
        spares=parse_count("--spares", given["spares"]),
        host_name=given["host_name"],
        observers=parse_observers(given),
        full_traceback=given["full_traceback"],
        post_mortem=given["post_mortem"] or None,
    )


def _last_call(text: str | None, *, is_range: bool) -> float:
    if text is None:
        return 5.0
    if not is_range:
        raise UsageError("--last-call: expected with --nnodes MIN:MAX; a fixed number of hosts is waited for")
    return parse_seconds("--last-call", text)


def _window(text: str | None) -> float | None:
    return None if text is None else parse_seconds("--restart-window", text)


def _endpoint(given: dict[str, Any]) -> str | None:
    """Return the endpoint, from whichever of its spellings was used."""
    endpoint, address, port = given["rdzv_endpoint"], given["master_addr"], given["master_port"]
    if endpoint:
        return str(endpoint)
    if address is None and port is None:
        return None
    number = parse_count("--master-port", port) if port is not None else 29500
    return join_address(spell_host(address or loopback()), number)


def _own_address(environment: Mapping[str, str]) -> str | None:
    """Return ``ASYNCPAR_BIND``, unless an outer launcher has set it for its rank."""
    is_rank = LaunchEnvironment.is_in(environment) or environment.get(ELASTIC_PIPE)
    return None if is_rank else environment.get("ASYNCPAR_BIND") or None


def _timeout(given: dict[str, Any]) -> float:
    if given["rdzv_timeout"] is not None:
        return parse_seconds("--rdzv-timeout", given["rdzv_timeout"])
    configured = parse_conf(given["rdzv_conf"])
    return 300.0 if configured is None else configured
