"""Chapters of the report of a sweep."""
