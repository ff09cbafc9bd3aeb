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

- *Restarted children.*  ``strategy``: "one_for_one" is the child that failed; "one_for_all" all children;
  "rest_for_one" it and those after it.  The others are stopped first, in reverse order; then all are started in order.
- *Conditions.*  ``restart`` of each child: "permanent" after any end, "transient" after a failure (a kill is one),
  "temporary" never.  Requests to a supervisor (``terminate_child``, ``restart_child``) are not failures.
- *Limit.*  After more restarts than ``intensity`` allows, all children are stopped and the supervisor fails, which its
  own owner is notified of.  A restart of several children counts once, a start that fails while restarting again.
- *Delay.*  At once, or after ``backoff``; a supervisor waits without blocking, and a stop ends its wait at once.
- *End.*  Stopping the supervisor stops its children in reverse order, each within its ``shutdown`` seconds, after
  which it is killed.  Killing the supervisor kills its children.

Modules: ``policy`` (settings), ``machine`` and ``events`` (decisions, pure), ``child`` (declaration,
status and record of a child), ``supervisor`` (the actor).
"""
