"""Small sites and federations in this process."""
