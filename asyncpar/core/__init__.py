"""Base of all layers: settings, threads and event loops, signal handlers, diagnostics."""
