"""Building blocks of the fairseq models."""
