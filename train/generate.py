"""Continue a text with a trained run: `leantron generate <run> --prompt "def main():"`.

One process, whatever layout the run was trained in: the checkpoint is read by name. Each new token is computed from the whole
text so far (at most `train.seq_len` tokens of it), through the same attention back ends as training.
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from train.checkpoint.directory import list_checkpoints, newest_complete
from train.config.compose import load_config
from train.config.errors import ConfigError
from train.config.schema import Config
from train.worker import quiet_dependencies


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
    config = load_config(arguments.run / "config.yaml")
    path = _checkpoint(arguments.run, arguments.step)

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


def _checkpoint(run: Path, step: int | None) -> Path:
    directory = run / "checkpoints"
    if step is not None:
        found = dict(list_checkpoints(directory))
        if step not in found:
            steps = ", ".join(map(str, found)) or "none"
            raise ConfigError("--step", step, f"{directory} has no such checkpoint", f"choose one of: {steps}")
        return found[step]
    path, skipped = newest_complete(directory)
    for line in skipped:
        print(line, file=sys.stderr)
    if path is None:
        raise ConfigError("run", run, "it has no complete checkpoint", "train it to a checkpoint first")
    return path


def load_model(config: Config, path: Path) -> Any:
    """The run's model with the weights of a checkpoint, whole in this process, in evaluation mode. Starts a world of one."""
    quiet_dependencies()
    from train.engine import checkpoint, parallel
    from train.engine.build import build_model

    device = parallel.init_process_group(config.train.timeout)
    alone = replace(config.parallel, tp=1, pp=1, vpp=1, cp=1, ep=1, sp=False, processes=1, hosts=1)
    config = replace(config, parallel=alone, train=replace(config.train, recompute="none"))
    chunks = build_model(config, parallel.build_ranks(config, device), trainable=False)
    try:
        checkpoint.load(path, chunks, None)
    except ValueError as error:  # its message begins with the checkpoint
        raise ConfigError("run", path.parent.parent, str(error), "or name another with --step") from error
    return chunks[0].eval()


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
