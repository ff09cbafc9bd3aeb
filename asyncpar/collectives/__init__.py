"""Collective operations over the links of a rank: plan, check, run."""
