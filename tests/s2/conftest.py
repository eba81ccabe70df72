"""The oracle of the attention tests: the definition as a (heads, queries, keys) mask in float64, and inputs that strain the softmax."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
