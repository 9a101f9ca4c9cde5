"""Local training, with privacy and without."""
