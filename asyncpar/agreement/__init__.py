"""Agreement of ranks: comparison of settings and calls, votes, owed collectives, and the error for differences."""
