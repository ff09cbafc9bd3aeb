"""Any torch module as a stage of our pipeline executor."""
