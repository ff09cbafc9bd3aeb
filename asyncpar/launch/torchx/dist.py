"""The component ``dist.asyncpar`` of torchx: ``torchx run dist.asyncpar -j 2x4 --script train.py``."""

# ruff: noqa: UP006, UP035, UP045  # torchx reads the source, and knows annotations of this form only

import shlex
from typing import Dict, List, Optional

import torchx.specs as specs
from torchx.components.dist import parse_nnodes
from torchx.components.structured_arg import StructuredNameArgument

from asyncpar.errors import UsageError


def asyncpar(
    *script_args: str,
    script: str = "",
    m: str = "",
    image: str = "",
    name: str = "/",
    h: str = "",
    cpu: int = 2,
    gpu: int = 0,
    memMB: int = 1024,  # noqa: N803  # torchx's name
    j: str = "1x2",
    env: Optional[Dict[str, str]] = None,
    max_retries: int = 0,
    rdzv_port: int = 29400,
    secret_file: str = "",
    mounts: Optional[List[str]] = None,
) -> specs.AppDef:
    """Run a program in ranks of asyncpar, one launcher per host.

    Args:
        script_args: arguments of the program
        script: script to run; or give m
        m: Python module to run
        image: image (or the folder, for local schedulers)
        name: name of the job, as in dist.ddp
        h: named resource, instead of cpu, gpu and memMB
        cpu: processors of a host
        gpu: GPUs of a host
        memMB: memory of a host in MB
        j: {nnodes}x{nproc_per_node}
        env: environment variables, as ENV1=v1,ENV2=v2
        max_retries: how often the scheduler tries again
        rdzv_port: port on the first host where the others meet
        secret_file: file with the job's secret, the same on all hosts; needed with several
        mounts: mounts, as in dist.ddp
    """
    if bool(script) == bool(m):
        raise UsageError("expected one of --script and -m")
    least, hosts, ranks, _ = parse_nnodes(j)
    if int(least) != int(hosts):
        raise UsageError(f"-j: expected a number of hosts, got {j!r}; hosts that come and go need asyncpar agent")
    if int(hosts) > 1 and not secret_file:
        raise UsageError("--secret_file: needed with several hosts; make one with head -c 32 /dev/urandom")
    words = ["asyncpar", "launch", "--nnodes", str(hosts), "--nproc-per-node", str(ranks)]
    command = shlex.join(words)
    if int(hosts) > 1:
        # a first host that does not know its own address must not be found at loopback: $$ is one $ to torchx
        first = f"$${{{specs.macros.rank0_env}:-$$(hostname)}}:{rdzv_port}"
        place = f"--node-rank {specs.macros.replica_id} --rdzv-endpoint {first} --rdzv-id {specs.macros.app_id}"
        command += f" {place} --secret-file {shlex.quote(secret_file)}"
    command += f" {shlex.join([*(['--module', m] if m else [script]), *script_args])}"
    named = StructuredNameArgument.parse_from(name=name, m=m or None, script=script or None)
    role = specs.Role(
        name="ranks",
        image=image,
        min_replicas=int(hosts),
        num_replicas=int(hosts),
        entrypoint="bash",
        args=["-c", f"exec {command}"],
        env=dict(env or {}),
        port_map={"rendezvous": rdzv_port},
        resource=specs.resource(cpu=cpu, gpu=gpu, memMB=memMB, h=h or None),
        max_retries=max_retries,
        mounts=specs.parse_mounts(mounts) if mounts else [],
    )
    return specs.AppDef(name=named.run_name, roles=[role])
