"""What ranks settle before they go on: the collectives that each owes the others, and the errors where they differ."""
