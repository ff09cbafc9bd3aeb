"""Deadlines that travel: what ``asyncio.timeout`` says at a caller is kept by whoever serves the call.

``discovery`` reads the timeouts off a suspended task; ``sweeper`` does so for calls that take long, and ``calls`` tells
the callee, which keeps to them by an ``alarm``.
"""
