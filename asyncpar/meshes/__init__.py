"""Meshes: one actor per rank, called together, by named axes."""
