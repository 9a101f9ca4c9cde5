"""The hospital's model at work."""
