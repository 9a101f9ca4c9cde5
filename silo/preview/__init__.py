"""What would leave, before it does."""
