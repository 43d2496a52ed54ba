"""The decoder in plain torch: its blocks and KV cache, and text generation with it. Imports no fairseq."""
