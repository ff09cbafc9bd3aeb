"""Supervision: actors that fail are restarted, by the rules of Erlang.

::

    class Store(Actor): ...
    class Server(Actor): ...

    await node.spawn(
        Supervisor,
        [Child(Store, "/var/cache", name="store"), Child(Server, name="server", restart="transient", shutdown=30.0)],
        strategy="rest_for_one",                       # a new store means a new server, but not the other way round
        intensity=Intensity(restarts=3, period=5.0),   # more than that, and the supervisor itself fails
        backoff=Backoff(initial=0.1, maximum=10.0),    # wait 0.1 s before the first restart, then 0.2 s, ...
        name="service",
    )

- *Who is restarted.*  ``strategy``: "one_for_one" the child that failed; "one_for_all" all children; "rest_for_one" it
  and those after it.  The others are stopped first, last one first; then all are started in order.
- *After what.*  ``restart`` of each child: "permanent" after any end, "transient" after a failure (a kill is one),
  "temporary" never.  What a supervisor was asked to do (``terminate_child``, ``restart_child``) is no failure.
- *How often.*  More restarts than ``intensity`` allows: all children are stopped and the supervisor fails, which its
  own owner hears.  A restart of several children counts once, a start that fails while restarting counts again.
- *How soon.*  At once, or after ``backoff``; a supervisor waits without blocking, and stops at once while it waits.
- *In the end.*  Stopping the supervisor stops its children, last one first, each within its ``shutdown`` seconds, after
  which it is killed.  Killing the supervisor kills its children.

Modules: ``policy`` (settings), ``machine`` and ``events`` (decisions, pure), ``child`` (declaration,
status and record of a child), ``supervisor`` (the actor).
"""
