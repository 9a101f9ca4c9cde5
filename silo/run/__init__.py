"""One run of the daemon."""
