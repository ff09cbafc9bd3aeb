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

- ``actor``: what users write, ``declaration`` what it may look like; ``ref``: what callers hold, ``reference_types``
  how it stands for its class; ``mailbox``, ``down``, ``dead_letters``: the values they meet.
- ``message``: what actor systems say to each other.
- ``system``: ``ActorSystem``, which joins the halves; ``switchboard``: who hears which message; ``post``: the way out.
- Calling: ``caller``, ``pending``, ``line`` and ``window`` (pure: how much may wait for an actor), ``arguments``.
- Being called: ``callee``; ``roster``, ``spawner``, ``lookup``, ``requests`` (of other ranks), ``household`` (who owns
  whom, who hears of an end); ``birth``, ``cell``: the life of one actor, with its ``backlog``, its
  ``ending`` and its ``side`` lanes; ``handler``: runs its code, by ``execution`` and in ``thread``; ``endpoint``:
  signatures and the binding of arguments; ``delivery``: the message that is handled.
- ``failure``, ``error_text``: exceptions as text; ``culprit``: whose code blocks the loop.
- ``watches``: exactly one ``Down``.  ``place``, ``groups``: actors on a mesh and their communicators.
- ``streams``, ``stream_caller``: streams of a call, in both directions.
- ``deadlines``: ``asyncio.timeout`` that travels.
- ``door``, ``door_values``: the same endpoints for programs without a node, over gRPC.
"""
