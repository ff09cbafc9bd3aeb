"""The dashboard of a job: one web page, live from the launcher, or as a file with its data inside."""
