"""Who somebody is, and what they sign."""
