"""The name of the backend, which ``registration`` needs before torch may be imported."""

NAME = "asyncpar"
