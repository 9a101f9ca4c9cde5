"""Documents and drawings without any subject of their own."""
