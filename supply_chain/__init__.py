"""What Medsilo is built of: that it is pinned, and what is known against it (``docs/supply-chain.md``)."""
