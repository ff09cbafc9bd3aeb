"""Agreement of the ranks of a group that are left when others are lost."""
