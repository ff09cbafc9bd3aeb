"""`asyncpar launch`: one agent per host starts, watches and ends the ranks of a job."""
