"""The only way out."""
