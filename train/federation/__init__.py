"""A run over several sites: each is a torchrun world of its own, and they synchronise rarely through an outer step."""
