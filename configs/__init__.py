"""Hydra groups: what to run. Data only; `train.config.compose` reads it."""
