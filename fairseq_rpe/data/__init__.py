"""Corpora: the installed Python's library sources as a binarised code corpus."""
