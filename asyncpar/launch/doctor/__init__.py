"""`asyncpar doctor`: checks of this host and of the connections to others, with advice for each finding."""
