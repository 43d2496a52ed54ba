"""``fairseq-rpe``: thin sub-commands over fairseq's own training and evaluation."""
