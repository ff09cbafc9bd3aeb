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

What is promised stands in ``semantics.md`` beside this file, sentence by sentence, each with its test.

What is not: an actor that asks an actor that (directly or not) waits for it waits for ever, unless a deadline ends it;
only the direct case is recognized and refused.  A plain ``def`` endpoint cannot be interrupted: a cancellation drops
its result, and closing the node waits for it, saying so.

Where to read, in this order

- ``actor``: the base class of users' actors; ``declaration``: endpoint marks and mailbox policies; ``ref``: references;
  ``ending``: reasons and errors of an actor's end; ``dead_letters``: told messages that were not handled.
- ``message``: the messages between actor systems; ``outbound`` sends them, ``routing`` dispatches those that arrive.
- ``system``: ``ActorSystem``, the calling and the called half together.
- Calling: ``caller``, ``pending``; ``window`` (pure): how many bytes may wait for one actor.
- Called: ``callee``: calls that are served, and their answers; ``registry``: actors by name; ``lifecycle``: starting
  actors, and reporting their ends; ``requests``: of other ranks, to start or end an actor.
- One actor: ``cell``: its task; ``mailbox``: its queue and those of its concurrent endpoints; ``executor``: runs its
  endpoints and hooks by ``execution`` (interruptible code, threads); ``endpoint``: signatures and the binding of
  arguments; ``delivery``: the message that is handled.
- ``failure``: exceptions as text; ``culprit``: which actor blocks the loop.
- ``watches``: exactly one ``Down`` per watch.  ``groups``: communicators of actors on a mesh.
- ``streams``, ``stream_caller``: streams of a call, in both directions.
- ``deadlines``: ``asyncio.timeout`` is sent along with a call.
- ``gateway``: the same endpoints for programs without a node, over gRPC.
"""
