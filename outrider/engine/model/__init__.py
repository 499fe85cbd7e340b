"""Load a checkpoint, check it, and run its forward on packed rows."""
