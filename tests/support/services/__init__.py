"""Services and their peers, in this process or as children of the tests."""
