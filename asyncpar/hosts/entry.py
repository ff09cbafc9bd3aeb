"""Entry of an agent into a group: as a newcomer, or as the voter that this host was when its agent ended.

A newcomer asks one agent after another until the leader admits it, or states why not.  An agent that finds its votes
becomes the same voter again if the group cannot go on without it; otherwise the host is a newcomer under its name.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from asyncpar._proto.asyncpar.v1 import group_pb2 as pb
from asyncpar.errors import LaunchError, UsageError
from asyncpar.hosts.codec import decode_entry, decode_group, encode_entry, encode_group
from asyncpar.hosts.consensus_messages import DurableState, Entry
from asyncpar.hosts.group import GroupNode, GroupState
from asyncpar.hosts.network import GroupNetwork
from asyncpar.net.security.identity import role_in

_RETRY_SECONDS = 0.2
_ENTER_SECONDS = 6.0
_GOES_ON_SECONDS = 3.0
"""Seconds within which a group that can go on without this voter admits it as a newcomer."""


async def find_place(
    own: GroupNode, stored: DurableState | None, join: Sequence[str], network: GroupNetwork, *, version: str
) -> DurableState:
    """Return this agent's initial state: ``stored``, its votes, if it has to be the voter that it was.

    ``own`` is its node as a newcomer to the group of the agents at ``join``, or else as the founder of one.  Raises as
    ``enter_group`` does, and ``UsageError`` if the votes are those of another host.
    """
    before = None if stored is None else decode_group(stored.decided.content)
    place = None
    if stored is not None and before is not None:
        host = stored.node.rpartition("#")[0]
        if host != own.name:
            raise UsageError(
                f"--state-dir: holds the votes of host {host!r}, and this one is called {own.name!r}; give each agent "
                "a directory of its own"
            )
        was, now = role_in(stored.node), role_in(own.node)
        if was != now:
            raise UsageError(
                f"--state-dir: holds the votes of {was or 'an agent without certificates'}, and this one "
                f"{f'is {now}' if now else 'has none'}; give the --certs of then, or another directory"
            )
        place = next((one for one in before.nodes if one.node == stored.node and one.address == own.address), None)
        others = tuple(one.address for one in before.nodes if one.node != stored.node)
        if place is None and not join:
            join = others  # it was declared lost before, or serves elsewhere now
    if not join:
        return stored if stored is not None and place is not None else found_group(own)
    seconds = _ENTER_SECONDS if place is None else _GOES_ON_SECONDS
    try:
        known = b"" if stored is None else encode_entry(stored.decided)
        entry = await enter_group(join, own, network, version=version, seconds=seconds, known=known)
    except LaunchError:
        if stored is None or place is None:
            raise
        return stored  # without it there is no leader
    return DurableState(decided=entry, node=own.node)


def found_group(own: GroupNode) -> DurableState:
    """Return the first entry of a new group, of which ``own`` is the only agent."""
    content = encode_group(GroupState(nodes=(own,)))
    return DurableState(
        decided=Entry(generation=0, voters=(own.node,), nodes=(own.node,), content=content), node=own.node
    )


async def enter_group(
    addresses: Sequence[str],
    own: GroupNode,
    network: GroupNetwork,
    *,
    version: str,
    seconds: float,
    known: bytes = b"",
) -> Entry:
    """Return the group's last decided entry, in which ``own`` is an agent; ``known`` is the entry that it had before.

    Raises ``UsageError`` with the group's reason if there is no place, ``AuthenticationError`` if its secret is another
    one, and ``LaunchError`` if nobody at ``addresses`` (``host:port``) answers within ``seconds``, or to the first
    request to each of them, which takes its time with one that is stopped.
    """
    loop = asyncio.get_running_loop()
    deadline = loop.time() + seconds
    message = pb.EnterRequest(
        version=version, node=own.node, name=own.name, address=own.address, is_witness=own.is_witness, known=known
    )
    waiting, unasked, refusal = list(addresses), set(addresses), ""
    trouble = leader = by = ""
    while True:
        address = waiting.pop(0) if waiting else addresses[0]
        unasked.discard(address)
        try:
            reply = await network.ask(address, message)
        except ConnectionError as error:
            trouble = f"no agent answers at {address} ({error})"
            if address == leader:
                trouble += f", where the leader is by what the agent at {by} knows; a host must be able to reach it"
        else:
            if reply.entry:
                return decode_entry(reply.entry)
            refusal = reply.refusal or refusal  # a reply that only names the leader keeps the earlier refusal
            if reply.refusal and not reply.is_passing:
                raise UsageError(reply.refusal)
            if reply.leader_address and loop.time() <= deadline:
                trouble = f"the agent at {address} names a leader at {reply.leader_address}, which does not let it in"
                waiting.insert(0, reply.leader_address)
                leader, by = reply.leader_address, address
                await asyncio.sleep(0.01)
        if loop.time() > deadline and not unasked:
            if refusal.startswith("--"):
                raise UsageError(refusal)
            raise LaunchError(
                f"--join: {refusal or trouble}, for {seconds:g} s; is an agent running there (`asyncpar agent`)?"
            )
        if not waiting:
            waiting = list(addresses)
            await asyncio.sleep(_RETRY_SECONDS)
