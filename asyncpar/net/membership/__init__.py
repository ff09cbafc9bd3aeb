"""How ranks become a world: the rendezvous, what decides in it and how a rank joins."""
