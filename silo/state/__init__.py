"""What stands in the hospital's own files."""
