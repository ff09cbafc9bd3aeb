"""Who is who in a job: identities, the certificates that prove them, and the directories they are kept in."""
