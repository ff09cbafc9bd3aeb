"""Identities of the parties of a job, the certificates that prove them, and the directories that hold these."""
