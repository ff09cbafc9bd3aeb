"""Collectives over arrays on CUDA devices, by NCCL or through the host.

Theory of operation.  NCCL hangs where ranks differ, so nothing is enqueued before all ranks have called the same: the
ranks of a group notify its first rank that they have come to an operation, over the links that all collectives use,
which compare fingerprints (``agree.py``).  When all have, the first rank gives the operation its place in the order in
which all ranks enqueue, and notifies them: from then on the operation is launched everywhere.  While it runs on the
devices, the ranks agree on the next ones.  A rank whose launched operation fails (it was cancelled, a rank was lost, it
timed out) aborts the NCCL communicator with all that runs on it, and notifies the other ranks, which do so too; the
next operation makes a new one, under the next *epoch* (``channel.py``).  No thread waits and nothing blocks: one poller
per event loop queries the events of all operations (``host.py``).
"""
