"""Texts that ask questions: what is asked, known sets of it, how a model's answers are judged. Without any model."""
