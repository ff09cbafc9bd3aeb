"""Meshes: one actor per rank, called together, by named axes.

Lay out the ranks, start an actor on each, and call them all::

    grid = node.nodes.reshape(dp=-1, tp=2)               # row-major: the last axis runs fastest
    trainers = await grid.spawn(Trainer, settings)       # all or none
    losses = await trainers.all(Trainer.step)(batch)     # MeshValues[float]: places to values
    losses.at(dp=0, tp=1), losses.by_rank()
    async for place, loss in trainers.step.as_completed(batch): ...
    async for place, item in trainers.samples.stream(10): ...
    trainers.log.tell("halfway")
    row, one, any_one = trainers.slice(dp=0), trainers.at(dp=0, tp=1), trainers.choose()
    async for place, down in trainers.watch(): ...
    await trainers.stop()

Inside such an actor ``self.group("dp")`` is the communicator over those that differ from it only along ``dp``.

Promises

- *All at once.*  A call is checked and its arguments are encoded once, then sent to all; the values come in mesh order.
- *Failures.*  The call waits for the other actors.  Then ``MeshError``, an ``ExceptionGroup``, has one exception for
  each that failed, as from an ask, with a note of its place; ``values`` are the results of the others.  A wrong
  call raises ``UsageError`` and sends nothing.  Cancelling (``asyncio.timeout`` does) cancels all.
- *Collectives in calls that fail.*  If a call fails on some actors, collectives in which the others wait half a second
  later are given up (``PeerCancelled``); their other work goes on.  Such a call, and one that is cancelled, ends the
  groups of the called actors, so that no operation is matched with one of an earlier call: ``self.group(...)`` returns
  new ones.  Calls of single actors (``at``, ``choose``) and tells do not do that.

Modules

- ``shape``: ranks and coordinates; ``values``: results and errors of a call.  Both are pure.
- ``nodes``: the ranks on which actors are spawned.  ``mesh_ref``: references to the actors of a mesh, their endpoints
  and watches.
- ``calls``: rounds of calls, the notices by which one failure ends a round, and the count of asks in flight.
"""
