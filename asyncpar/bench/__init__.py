"""`asyncpar bench`: time collectives by size, in the columns of nccl-tests, with every result checked.

Read ``settings.py``, ``cases.py`` (what is right), ``measure.py`` (how time is taken), ``report.py``; ``worker.py`` is
what each rank runs.
"""
