"""How ranks meet through a store of torch and become a world."""
