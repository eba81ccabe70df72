"""Token after token with a trained model: prompts once, then one token of each sequence at a time over the layers' key/value caches.

A layer's cache holds what its attention pattern still needs (`s2/cache.py`). A context is at most `train.seq_len` tokens long, as in
training: when a sequence of the batch passes it, every one goes on from its last half of that length, read in anew.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from train.config.schema import Config


@dataclass
class Speed:
    """What the work took: `prompt_tokens` read in `prompt_seconds`, then `tokens` steps of the batch in `seconds`."""

    prompt_tokens: int = 0
    prompt_seconds: float = 0.0
    tokens: int = 0
    seconds: float = 0.0

    def __str__(self) -> str:
        text = f"prompt: {self.prompt_tokens} tokens in {1e3 * self.prompt_seconds:.1f} ms"
        return text + (f"; then {1e3 * self.seconds / self.tokens:.2f} ms per token" if self.tokens else "")


class Decoder:
    """The logits of the next token of a batch of sequences.

    `model`: a whole language model in evaluation mode; `sequences`: token numbers of each, at least one. Sequences of different lengths
    share a batch. Use it as a context: on leaving, the model is as before.
    """

    def __init__(self, model: Any, config: Config, sequences: Sequence[Sequence[int]]) -> None:
        self.model, self.limit, self.vocabulary = model, config.train.seq_len, config.model.vocab_size
        self.device = next(model.parameters()).device
        self.layers = [module for module in model.modules() if hasattr(module, "start_decoding")]
        self.contexts = [list(sequence)[-self.limit :] for sequence in sequences]
        self.speed = Speed()

    def __enter__(self) -> "Decoder":
        return self

    def __exit__(self, *_: object) -> None:
        for layer in self.layers:
            layer.stop_decoding()

    def start(self) -> Any:
        """Reads the contexts in; (batch, vocabulary) float32 logits of the token after each."""
        import torch

        began = time.perf_counter()
        lengths = [len(context) for context in self.contexts]
        for layer in self.layers:
            layer.start_decoding(lengths, self.limit)
        tokens = torch.zeros(len(lengths), max(lengths), dtype=torch.int64)
        for row, context in zip(tokens, self.contexts, strict=True):
            row[: len(context)] = torch.tensor(context)
        positions = torch.arange(max(lengths), device=self.device)[None].expand(len(lengths), -1)
        with torch.no_grad():
            logits = self.model(tokens.to(self.device), positions)
        last = torch.tensor(lengths, device=logits.device) - 1
        found = logits[torch.arange(len(lengths), device=logits.device), last, : self.vocabulary].float().cpu()
        self.speed.prompt_tokens += sum(lengths)
        self.speed.prompt_seconds += time.perf_counter() - began
        return found

    def step(self, tokens: Sequence[int]) -> Any:
        """Adds a token to each sequence; (batch, vocabulary) float32 logits of the one after it."""
        import torch

        for context, token in zip(self.contexts, tokens, strict=True):
            context.append(token)
        if max(map(len, self.contexts)) > self.limit:
            self.contexts = [context[-max(1, self.limit // 2) :] for context in self.contexts]
            return self.start()
        began = time.perf_counter()
        column = torch.tensor([[token] for token in tokens], device=self.device)
        positions = torch.tensor([[len(context) - 1] for context in self.contexts], device=self.device)
        with torch.no_grad():
            logits = self.model(column, positions)[:, 0, : self.vocabulary].float().cpu()
        self.speed.tokens += 1
        self.speed.seconds += time.perf_counter() - began
        return logits


def draw(logits: Any, temperature: float, top_k: int, generator: Any) -> int:
    """One token number from `logits` (vocabulary,) float32: softmax(logits / temperature) over the `top_k` likeliest, 0: over all.

    Temperature 0 takes the likeliest.
    """
    import torch

    if temperature == 0:
        return int(logits.argmax())
    if top_k:
        floor = logits.topk(min(top_k, logits.numel())).values[-1]
        logits = logits.masked_fill(logits < floor, float("-inf"))
    return int(torch.multinomial(torch.softmax(logits / temperature, -1), 1, generator=generator))


def continue_sequences(
    model: Any,
    config: Config,
    sequences: Sequence[Sequence[int]],
    *,
    tokens: int,
    end: int,
    temperature: float,
    top_k: int = 0,
    seed: int = 0,
) -> tuple[list[list[int]], Speed]:
    """Each sequence with at most `tokens` new ones, up to its `end` token, and what it took.

    Every sequence draws from a generator of its own with `seed`, so that its continuation does not depend on the others of the batch.
    """
    import torch

    found = [list(sequence) for sequence in sequences]
    generators = [torch.Generator("cpu").manual_seed(seed) for _ in found]
    going = [True] * len(found)
    with Decoder(model, config, sequences) as decoder:
        logits = decoder.start()
        for left in range(tokens - 1, -1, -1):
            drawn = [draw(row, temperature, top_k, generator) for row, generator in zip(logits, generators, strict=True)]
            going = [still and token != end for still, token in zip(going, drawn, strict=True)]
            for sequence, token, still in zip(found, drawn, going, strict=True):
                if still:
                    sequence.append(token)
            if not left or not any(going):
                break
            logits = decoder.step(drawn)
    return found, decoder.speed
