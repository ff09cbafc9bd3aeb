"""Formation of worlds: the rendezvous service, its state machine, and the client that joins."""
