"""Corpora: any text, published data sets or the Python standard library, prepared as binarised data folders."""
