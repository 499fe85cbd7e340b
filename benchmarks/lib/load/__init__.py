"""Load over HTTP: requests that arrive or wait their turn, and what their streams show."""
