"""What hospitals call."""
