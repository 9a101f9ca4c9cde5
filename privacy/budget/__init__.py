"""What privacy costs: accounting, the plan's promise, the ledger, noise."""
