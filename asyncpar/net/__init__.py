"""The network of ranks: frames, lanes, links, the shared memory of a host, how a world forms, identities."""
