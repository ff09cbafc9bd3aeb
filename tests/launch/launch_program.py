"""The command ``asyncpar``, as a file that a process which has imported it can run."""

from asyncpar.__main__ import main

if __name__ == "__main__":
    main()
