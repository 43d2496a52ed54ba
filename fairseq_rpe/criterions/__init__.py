"""Losses for fairseq."""
