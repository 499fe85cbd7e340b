"""Draft by copying from the text so far: n-grams, suffixes, edits."""
