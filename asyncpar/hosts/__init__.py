"""Hosts that act as one: who decides, which worlds a job has, and what hosts notify each other of."""
