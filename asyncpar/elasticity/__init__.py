"""Training that outlives its ranks: any rank may leave at any moment, others join, and results stay bitwise equal.

``portions.py`` explains why the sums are equal in every world, ``step.py`` how a step is committed everywhere or
nowhere, ``worlds.py`` where worlds come from; ``job.py`` is the interface for programs.
"""
