"""Train the language model on this machine: ``python scripts/examples/engines/local.py --steps 20``."""

from __future__ import annotations

from language_model import RANKS, check_options, run_on, train_language_model  # type: ignore[import-not-found]  # beside this script

import asyncpar as ap

if __name__ == "__main__":
    check_options()
    run_on("local", lambda arguments: ap.cluster.run(train_language_model, list(arguments), ranks=RANKS))
