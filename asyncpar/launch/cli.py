"""The command line: ``asyncpar launch ...`` and room for more commands."""

from __future__ import annotations

import importlib.metadata
import os
import signal
import sys
from collections.abc import Callable
from typing import Any, TypeVar

import click

from asyncpar.errors import AsyncparError, UsageError
from asyncpar.launch.options import (
    BACKENDS,
    LaunchOptions,
    ProgramKind,
    parse_conf,
    parse_count,
    parse_nnodes,
    parse_nproc,
    parse_seconds,
    parse_streams,
)

_USAGE_EXIT = 2
Function = TypeVar("Function", bound=Callable[..., object])


class _BothSpellings(click.Option):
    """An option that may be written with dashes or, as torchrun allows, with underscores; help shows the dashes."""

    def __init__(self, declarations: list[str], **attributes: Any) -> None:
        super().__init__(declarations, **attributes)
        self.shown = list(self.opts)
        self.opts += [f"--{name[2:].replace('-', '_')}" for name in self.opts if "-" in name[2:]]

    def get_help_record(self, context: click.Context) -> tuple[str, str] | None:
        every, self.opts = self.opts, self.shown
        try:
            return super().get_help_record(context)
        finally:
            self.opts = every


class _LaunchCommand(click.Command):
    """Says what is wrong with the command line in one line."""

    def parse_args(self, context: click.Context, arguments: list[str]) -> list[str]:
        try:
            return super().parse_args(context, arguments)
        except click.UsageError as error:
            click.echo(f"asyncpar launch: {error.format_message()} (asyncpar launch --help shows all)", err=True)
            sys.exit(_USAGE_EXIT)


def _option(*declarations: str, **attributes: Any) -> Callable[[Function], Function]:
    return click.option(*declarations, cls=_BothSpellings, **attributes)


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 80})
@click.version_option(importlib.metadata.version("asyncpar"), prog_name="asyncpar")
def main() -> None:
    """Collectives, actors and parallel training as coroutines."""


@main.command(cls=_LaunchCommand, context_settings={"allow_interspersed_args": False})
@_option("--nproc-per-node", metavar="N", default="1", help="Ranks on this host; 'auto' or 'cpu': one per core.  [1]")
@_option("--nnodes", metavar="N", default="1", help="Number of hosts.  [1]")
@_option("--node-rank", metavar="N", default=None, help="Place of this host; 0 is the one at the endpoint.")
@_option("--rdzv-endpoint", metavar="HOST:PORT", default=None, help="Where the first host's agent serves the others.")
@_option("--master-addr", metavar="HOST", default=None, help="Host of the endpoint, as in --rdzv-endpoint.")
@_option("--master-port", metavar="PORT", default=None, help="Port of the endpoint, as in --rdzv-endpoint.")
@_option("--rdzv-id", metavar="NAME", default=None, help="Name of the job; agents of other jobs are refused.")
@_option("--rdzv-backend", metavar="NAME", default="asyncpar", help="asyncpar; c10d and static mean the same.")
@_option("--rdzv-conf", metavar="K=V,...", default="", help="timeout=SECONDS, as --rdzv-timeout.")
@_option("--rdzv-timeout", metavar="SECONDS", default=None, help="How long to wait for hosts and ranks.  [300]")
@_option("--standalone", is_flag=True, help="One host, any free port, whatever the endpoint says.")
@_option("--local-addr", metavar="ADDRESS", default=None, help="Address of this host that its ranks bind to.")
@_option("--secret-file", metavar="FILE", default=None, envvar="ASYNCPAR_SECRET_FILE", help="The job's secret.")
@_option("--transport", metavar="NAME", default=None, envvar="ASYNCPAR_TRANSPORT", help="Pin the lane: tcp or grpc.")
@_option("--max-restarts", metavar="N", default="0", help="Start all ranks again after a failure, N times.  [0]")
@_option("--grace-period", metavar="SECONDS", default="10", help="From asking ranks to end until SIGKILL.  [10]")
@_option("--log-dir", metavar="DIR", default=None, help="Log files: DIR/attempt_N/RANK/stdout.log, stderr.log.")
@_option("--redirects", "-r", metavar="STREAMS", default="0", help="To files only: 1 stdout, 2 stderr, 3 both.")
@_option("--tee", "-t", metavar="STREAMS", default="0", help="To files too; for some ranks: 0:1,1:2.")
@_option("--start-method", metavar="NAME", default="spawn", help="Only spawn.")
@_option("--monitor-interval", metavar="SECONDS", default=None, help="Accepted; nothing here polls.")
@_option("--module", "-m", is_flag=True, help="PROGRAM is a Python module.")
@_option("--no-python", is_flag=True, help="PROGRAM is executed as it is.")
@click.argument("program")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def launch(program: str, arguments: tuple[str, ...], **given: Any) -> None:
    """Run PROGRAM, a Python script, in many processes that make one world.

    Options go before PROGRAM, its own ARGUMENTS after it.  On several hosts,
    run the same command on each.  Exits with the code of the rank that failed
    first (128 + N for signal N), and leaves no process behind.
    """
    try:
        options = _options(program, arguments, given)
        exit_code = _run(options)
    except UsageError as error:
        click.echo(f"asyncpar launch: {error}", err=True)
        exit_code = _USAGE_EXIT
    except AsyncparError as error:
        click.echo(f"asyncpar launch: {error}", err=True)
        exit_code = 1
    except KeyboardInterrupt:  # before or after the agent, which has a handler of its own
        exit_code = 128 + signal.SIGINT
    sys.exit(exit_code)


def _run(options: LaunchOptions) -> int:
    """Start late what is slow to import: mistakes in options show at once."""
    environment = dict(os.environ)
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # what matters comes as exceptions
    from asyncpar.launch.run import run_launch

    return run_launch(options, environment)


def _options(program: str, arguments: tuple[str, ...], given: dict[str, Any]) -> LaunchOptions:
    if given["module"] and given["no_python"]:
        raise UsageError("--module: expected alone, got --no-python too")
    if given["rdzv_backend"] not in BACKENDS:
        raise UsageError(f"--rdzv-backend: expected one of {', '.join(BACKENDS)}, got {given['rdzv_backend']!r}")
    if given["start_method"] != "spawn":
        raise UsageError(f"--start-method: expected spawn, got {given['start_method']!r}")
    nnodes = parse_nnodes(given["nnodes"])
    if given["standalone"] and nnodes > 1:
        raise UsageError(f"--standalone: expected with one host, got --nnodes {nnodes}")
    kind = ProgramKind.MODULE if given["module"] else ProgramKind.PROGRAM if given["no_python"] else ProgramKind.SCRIPT
    node_rank = given["node_rank"]
    return LaunchOptions(
        program=program,
        arguments=arguments,
        kind=kind,
        nnodes=nnodes,
        node_rank=None if node_rank is None else parse_count("--node-rank", node_rank),
        nproc=parse_nproc(given["nproc_per_node"]),
        endpoint=None if given["standalone"] else _endpoint(given),
        job=given["rdzv_id"] or None,
        timeout=_timeout(given),
        max_restarts=parse_count("--max-restarts", given["max_restarts"]),
        grace=parse_seconds("--grace-period", given["grace_period"]),
        log_dir=given["log_dir"],
        redirects=parse_streams("--redirects", given["redirects"]),
        tee=parse_streams("--tee", given["tee"]),
        local_addr=given["local_addr"],
        transport=given["transport"],
        secret_file=given["secret_file"],
    )


def _endpoint(given: dict[str, Any]) -> str | None:
    """Return the endpoint, from whichever of its spellings was used."""
    endpoint, address, port = given["rdzv_endpoint"], given["master_addr"], given["master_port"]
    if endpoint:
        return str(endpoint)
    if address is None and port is None:
        return None
    number = parse_count("--master-port", port) if port is not None else 29500
    host = address or "127.0.0.1"
    return f"[{host}]:{number}" if ":" in host else f"{host}:{number}"


def _timeout(given: dict[str, Any]) -> float:
    if given["rdzv_timeout"] is not None:
        return parse_seconds("--rdzv-timeout", given["rdzv_timeout"])
    configured = parse_conf(given["rdzv_conf"])
    return 300.0 if configured is None else configured
