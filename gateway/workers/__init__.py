"""Several processes that are one gateway: on one port, with one limit and one page of metrics."""
