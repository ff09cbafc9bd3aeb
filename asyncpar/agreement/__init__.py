"""Agreement of ranks: comparison of settings and calls, votes, owed collectives, and the error where ranks differ."""
