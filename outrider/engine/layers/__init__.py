"""Linear layers and the operations between them: protocols, and plain torch."""
