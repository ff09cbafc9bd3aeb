"""For tests, ours and yours: many ranks in one process, virtual time, conformance suites."""
