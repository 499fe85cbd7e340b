"""vLLM as an engine: remote proposers and coupled sampling inside its worker processes."""
