"""``python -m asyncpar`` is the command ``asyncpar``."""

from __future__ import annotations

from asyncpar.launch.cli import main

if __name__ == "__main__":
    main(prog_name="asyncpar")
