"""Load a checkpoint, check it, choose its attention, share out memory, and run its forward."""
