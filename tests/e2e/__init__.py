"""Tests of whole stacks, a package so that its fixtures end with its last test."""
