"""What every layer uses: settings, diagnostics of event loops and processes, weak sets of callbacks."""
