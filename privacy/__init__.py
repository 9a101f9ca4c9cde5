"""What may leave a hospital, and the proof of what did."""
