"""The rendezvous of ranks through a store of torch."""
