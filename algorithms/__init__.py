"""The federated methods, one file each, both halves side by side."""
