"""Images into shards."""
