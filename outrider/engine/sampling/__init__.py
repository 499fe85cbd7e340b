"""Edit logits, sample, and verify drafts."""
