"""The federated methods, one file each, both sides side by side."""
