"""Corpora: the installed Python's library sources, or any text, as binarised corpora."""
