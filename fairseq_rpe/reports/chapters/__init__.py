"""What the page says about a sweep, chapter by chapter."""
