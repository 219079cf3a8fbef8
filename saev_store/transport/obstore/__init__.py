"""Object stores through obstore."""
