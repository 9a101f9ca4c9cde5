"""What each method is under differential privacy and under masks, as it says itself."""
