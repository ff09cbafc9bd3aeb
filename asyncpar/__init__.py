"""asyncpar: collectives, actors and parallel training as coroutines."""
