"""A trained model on a text: perplexity, sliding windows, answers, receptive fields."""
