"""Ranks form a world: the rendezvous service, its state machine, and the client that joins."""
