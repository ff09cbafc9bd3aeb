"""`asyncpar doctor`: checks of this host and of the ways to others, with what to do about each finding."""
