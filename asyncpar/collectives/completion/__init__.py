"""Operations whose completion is defined by a policy: policies, and the agreement on contributors."""
