"""Continue a text with a trained run: `leantron generate <run> --prompt "def main():"`.

One process, whatever layout and however many sites the run was trained in (`train.trained`). The prompts are read once, then each new
token is computed over the layers' key/value caches (`train.decoding`). Texts go to stdout, the time per token to stderr.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from train.config.errors import ConfigError
from train.config.schema import Config
from train.decoding import Speed, continue_sequences
from train.trained import find, load_model


def main(argv: Sequence[str]) -> int:
    """Run the command; returns the exit code. Raises ConfigError for a run or a setting that cannot be used."""
    parser = argparse.ArgumentParser(prog="leantron generate", description="Continue a text with a trained run.")
    parser.add_argument("run", type=Path, help="the run's directory")
    parser.add_argument("--prompt", required=True, action="append", help="text to continue; several are continued as one batch")
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
    texts, speed = generate_all(
        model,
        config,
        arguments.prompt,
        tokens=arguments.tokens,
        temperature=arguments.temperature,
        top_k=arguments.top_k,
        seed=arguments.seed,
    )
    print("\n\n".join(texts))
    print(speed, file=sys.stderr)

    from train.engine import parallel

    parallel.shutdown()
    return 0


def generate(model: Any, config: Config, prompt: str, **settings: Any) -> str:
    """The text of one prompt; the settings are those of `generate_all`."""
    (text,), _ = generate_all(model, config, [prompt], **settings)
    return text


def generate_all(
    model: Any, config: Config, prompts: Sequence[str], *, tokens: int, temperature: float, top_k: int = 0, seed: int = 0
) -> tuple[list[str], Speed]:
    """Each of `prompts` with at most `tokens` new tokens, up to the end of its document, and what it took.

    `model`: what `load_model` returns. Draws from softmax(logits / temperature), of the `top_k` likeliest tokens when it is over 0. A text
    does not depend on the prompts beside it.
    """
    from train.data.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(config.data.tokenizer)
    sequences, speed = continue_sequences(
        model,
        config,
        [tokenizer.encode(prompt) or [tokenizer.eod] for prompt in prompts],
        tokens=tokens,
        end=tokenizer.eod,
        temperature=temperature,
        top_k=top_k,
        seed=seed,
    )
    return [tokenizer.decode(sequence) for sequence in sequences], speed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
