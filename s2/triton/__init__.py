"""Triton kernels of the S2 pattern: forward, backward, and the custom operator around them."""
