"""`asyncpar bench`: time collectives by size, in the columns of nccl-tests, with every result checked.

Read ``settings.py``, ``cases.py`` (expected results), ``measure.py`` (timing), ``report.py``; ``worker.py`` is the
program of each rank.
"""
