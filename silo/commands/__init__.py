"""The silo's commands."""
