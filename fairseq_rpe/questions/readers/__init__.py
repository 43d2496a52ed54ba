"""Readers of question-answering data sets, by format."""
