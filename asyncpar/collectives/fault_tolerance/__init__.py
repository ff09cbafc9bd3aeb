"""Agreement of the survivors of a group when ranks are lost."""
