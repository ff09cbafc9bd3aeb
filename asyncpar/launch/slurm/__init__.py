"""Jobs of Slurm: batch scripts, and how they are submitted."""
