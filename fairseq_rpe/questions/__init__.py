"""Question-answering data: benchmark sets, cloze questions, prompts and metrics. Independent of models."""
