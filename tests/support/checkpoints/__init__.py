"""Small random checkpoints on disk, and what their formulas say."""
