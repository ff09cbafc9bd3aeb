"""Actors on the ranks of a world: the runtime that runs them, supervision, and meshes of actors."""
