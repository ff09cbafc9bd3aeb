"""Training that outlives its ranks: any may go at any moment, others come, and the numbers stay the same to the bit.

``portions.py`` says why the sums are equal in every world, ``step.py`` how a step is committed everywhere or nowhere,
``worlds.py`` where worlds come from, ``job.py`` is what a program uses.
"""
