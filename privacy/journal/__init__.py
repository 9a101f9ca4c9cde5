"""The append-only record of what passed."""
