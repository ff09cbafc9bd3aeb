"""What ranks settle before they go on: equal settings, owed collectives, and the errors where ranks differ."""
