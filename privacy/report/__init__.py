"""What left, in words."""
