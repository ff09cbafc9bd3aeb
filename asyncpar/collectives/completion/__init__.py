"""Operations that are complete when a policy says so: policies, and the agreement on contributors."""
