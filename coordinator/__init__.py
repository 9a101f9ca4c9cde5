"""The coordinator daemon."""
