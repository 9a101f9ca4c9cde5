"""What passes, byte for byte, and the receipts for it."""
