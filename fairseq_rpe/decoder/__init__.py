"""Text generation with a decoder: prefill, cached decoding steps and beam search."""
