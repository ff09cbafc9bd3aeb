"""Supervision: which actors are started again when they fail, decided the way Erlang does."""
