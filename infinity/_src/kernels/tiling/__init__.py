"""Linears, embeddings and the loss of a language model in tiles that are gathered one at a time."""
