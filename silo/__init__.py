"""The hospital daemon."""
