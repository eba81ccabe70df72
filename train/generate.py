"""Continue a text with a trained run: `leantron generate <run> --prompt "def main():"`.

One process, whatever layout and however many sites the run was trained in (`train.trained`). Each new token is computed from the
whole text so far (at most `train.seq_len` tokens of it), through the same attention back ends as training.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from train.config.errors import ConfigError
from train.config.schema import Config
from train.trained import find, load_model


def main(argv: Sequence[str]) -> int:
    """Run the command; returns the exit code. Raises ConfigError for a run or a setting that cannot be used."""
    parser = argparse.ArgumentParser(prog="leantron generate", description="Continue a text with a trained run.")
    parser.add_argument("run", type=Path, help="the run's directory")
    parser.add_argument("--prompt", required=True, help="text to continue")
    parser.add_argument("--tokens", type=int, default=200, help="tokens to add at most (default 200)")
    parser.add_argument("--temperature", type=float, default=0.8, help="0 takes the likeliest token each time (default 0.8)")
    parser.add_argument("--top-k", type=int, default=0, help="draw from the k likeliest tokens only; 0: from all (default)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the draw (default 0)")
    parser.add_argument("--step", type=int, help="step of the checkpoint (default: the newest complete one)")
    arguments = parser.parse_args(list(argv))
    if arguments.tokens < 1:
        raise ConfigError("--tokens", arguments.tokens, "must be 1 or more", "give a positive number")
    if arguments.temperature < 0:
        raise ConfigError("--temperature", arguments.temperature, "must be 0 or more", "give 0 for the likeliest token")
    if arguments.top_k < 0:
        raise ConfigError("--top-k", arguments.top_k, "must be 0 or more", "give 0 to draw from all tokens")
    config, path = find(arguments.run, arguments.step)
    model = load_model(config, path)
    text = generate(
        model,
        config,
        arguments.prompt,
        tokens=arguments.tokens,
        temperature=arguments.temperature,
        top_k=arguments.top_k,
        seed=arguments.seed,
    )
    print(text)

    from train.engine import parallel

    parallel.shutdown()
    return 0


def generate(model: Any, config: Config, prompt: str, *, tokens: int, temperature: float, top_k: int = 0, seed: int = 0) -> str:
    """`prompt` and at most `tokens` new tokens, up to the end of the document.

    `model`: what `load_model` returns. Draws from softmax(logits / temperature), of the `top_k` likeliest tokens when it is over 0.
    """
    import torch

    from train.data.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(config.data.tokenizer)
    ids = tokenizer.encode(prompt) or [tokenizer.eod]
    device = next(model.parameters()).device
    generator = torch.Generator("cpu").manual_seed(seed)
    for _ in range(tokens):
        window = torch.tensor([ids[-config.train.seq_len :]], device=device)
        positions = torch.arange(window.shape[1], device=device)[None]
        with torch.no_grad():
            logits = model(window, positions)[0, -1, : config.model.vocab_size].float().cpu()
        next_id = _draw(logits, temperature, top_k, generator)
        if next_id == tokenizer.eod:
            break
        ids.append(next_id)
    return tokenizer.decode(ids)


def _draw(logits: Any, temperature: float, top_k: int, generator: Any) -> int:
    """One token id from `logits` (vocabulary,) float32."""
    import torch

    if temperature == 0:
        return int(logits.argmax())
    if top_k:
        floor = logits.topk(min(top_k, logits.numel())).values[-1]
        logits = logits.masked_fill(logits < floor, float("-inf"))
    return int(torch.multinomial(torch.softmax(logits / temperature, -1), 1, generator=generator))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
