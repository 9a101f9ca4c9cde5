"""What the coordinator keeps: runs, rounds, updates and receipts in a database."""
