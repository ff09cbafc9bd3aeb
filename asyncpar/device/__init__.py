"""Arrays on devices, and their transport and encoding there."""
