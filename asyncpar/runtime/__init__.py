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
    total = await ref.add(3)                          # ask: 13
    ref.add.tell(3)                                   # tell: fire and forget
    await ref.add.tell(3)                             # tell, and be slowed down if the actor is slow
    total = await ref.typed(Counter.add)(3)           # ask, checked by mypy and editors
    remote = system.ref("c", rank=1)                  # the actor of that name on another rank

What is promised

- *Order.*  An actor handles one message at a time.  Messages from one rank to one actor are handled in the order in
  which they were sent (asks are sent when they are awaited), each at most once.
- *Isolation.*  Arguments and results are copies, also between actors of one rank.  They may be plain data, dataclasses,
  ``msgspec.Struct``, numpy arrays of any layout (bfloat16 too) and actor references, nested as you like.  Arguments
  are checked against the endpoint's annotations.  An array arrives as a writable view on the message that carried it.
  No pickle, no code.
- *Errors.*  A wrong call (no such actor, no such endpoint, arguments that do not fit) raises ``UsageError`` at the
  caller, what the endpoint raised arrives as ``RemoteError`` with its traceback, a stopped actor is ``PeerCancelled``
  and a lost rank ``PeerLost``, at once.  What an actor raises never ends its node, and a told message that fails is
  logged where the actor lives.
- *Cancellation.*  Cancelling an ask (``asyncio.timeout`` does) takes effect at the caller at once; then the endpoint is
  cancelled where it runs, or never begun.  The same happens to the calls of a rank that is lost.
- *Back-pressure.*  At most 16 MiB and one message per sending rank wait in front of an actor; the rest waits at the
  sender.  Asks wait there by themselves, tells if they are awaited.
- *Blocking code.*  A plain ``def`` endpoint runs in the actor's own thread, always the same one; the loop goes on.  It
  cannot be interrupted: a cancellation drops its result, and closing the node waits for it.

What is not: an actor that asks an actor that (directly or not) waits for it waits for ever, unless a deadline ends it;
only the direct case is recognized and refused.

Where to read

- ``actor``: ``Actor`` and ``@endpoint``, what users write.  ``ref``: ``ActorRef``, what callers hold.
- ``system``: ``ActorSystem``, which joins the two halves: ``caller`` (asks and tells out, answers in) and ``callee``
  (calls in, answers out).  ``post`` is the way out for both.
- ``cell``: the task and mailbox of one actor; ``thread``: its thread; ``endpoint``: signatures and the binding of
  arguments; ``failure``: exceptions as text.
- ``message``: the envelopes (Call, Tell, Reply, Failure, Cancel, Credit); ``window``: how many messages may wait, pure.
- ``stream_caller``: calls with streams; ``stream_served``: the same where they are served; ``stream_feeds``: what the
  caller brings along.  ``stream_out`` and ``stream_in`` are the two ends of one stream, ``flow`` (pure) says how far
  one may be ahead of the other, ``stream_types`` what is a stream.
- ``deadline``: reads the timeouts off a suspended task; ``deadline_sweeper`` and ``call_deadlines`` do so for calls
  that take long and tell the callee, which keeps to them by an ``alarm``.
"""
