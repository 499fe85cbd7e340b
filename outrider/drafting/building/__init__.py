"""Build drafting methods from the flags that describe them."""
