"""Choose the scorer of a request, and read its tokens from one stream per scorer."""
