"""What a hospital agreed to, and whether it lasts."""
