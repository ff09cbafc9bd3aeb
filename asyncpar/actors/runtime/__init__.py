"""Actors: Python objects that live on a rank, are guarded by one task each, and are reached by messages.

Write a class, mark what others may call, spawn it, and call it from any rank::

    class Counter(Actor):
        def __init__(self, start: int = 0) -> None:
            self.total = start

        @endpoint
        async def add(self, n: int) -> int:
            self.total += n
            return self.total

    ref = await system.spawn(Counter, 10, name="c")   # on this rank; the constructor's arguments are not copied
    total = await ref.add(3)                          # ask: 13; for type checkers ``ref`` is a Counter
    ref.add.tell(3)                                   # tell: fire and forget
    await ref.add.tell(3)                             # tell, and be slowed down if the actor is slow
    remote = system.ref("c", rank=1, actor_class=Counter)   # the actor of that name on another rank

All promises are listed in ``semantics.md`` beside this file, sentence by sentence, each with its test.

Limits: an actor that asks an actor that waits for it, directly or not, waits forever unless a deadline ends the ask;
only the direct case is refused, any other is reported after ``ASYNCPAR_WAIT_WARNING`` seconds.  A plain ``def``
endpoint cannot be interrupted: a cancellation drops its result, and closing the node waits for it and logs that.

Modules, in reading order

- ``actor``: base class of users' actors; ``declaration``: endpoint marks and mailbox policies; ``ref``: references;
  ``ending``: reasons and errors of an actor's end; ``dead_letters``: told messages that were not handled.
- ``message``: the messages between actor systems; ``outbound`` sends them, ``routing`` receives and dispatches them.
- ``system``: ``ActorSystem``, which holds the calling and the called half.
- ``calls``: one call at its caller and at its actor; ``window`` (pure): flow control of messages and stream items.
- Calling: ``caller``; ``stream_caller``: calls with streams.
- ``ask_waits``: reports asks that wait for long, with the actors that they wait for; ``ask_answers`` answers it.
- Called: ``callee``: calls that are served, and their answers; ``registry``: actors by name and by stack;
  ``lifecycle``: starts and ends actors, also on request of other ranks, and reports their ends.
- One actor: ``cell``: its task; ``mailbox``: its queue and those of its concurrent endpoints; ``executor``: runs its
  endpoints and hooks; ``endpoint``: signatures and the binding of arguments.
- ``call_streams``: the streams of one call; ``stream_ends``: the two ends of one stream; ``stream_types`` (pure):
  annotations and marks of streams.
- ``deadlines``: sends the ``asyncio.timeout`` of a caller along; ``deadline_discovery`` reads it off a task.
- ``failure``: exceptions as text.
- ``watches``: exactly one ``Down`` per watch.  ``groups``: communicators of actors on a mesh.
- ``gateway``: the same endpoints for programs without a node, over gRPC.
"""
