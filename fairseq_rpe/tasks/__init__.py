"""Tasks for fairseq."""
