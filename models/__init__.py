"""Model files: where they are, what they say, how they are fetched and named. No torch."""
