"""What torch calls the backend."""

NAME = "asyncpar"
