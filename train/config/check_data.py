"""The data of a run before it starts: paths, mixture, split, and the vocabulary that its tokenizer needs."""

from pathlib import Path

from train.config.errors import ConfigError
from train.config.schema import Config
from train.data.config import DataConfig


def check_data(config: Config) -> int:
    """Return the model's vocabulary size. Raises ConfigError for data that is missing, damaged or of another tokenizer."""
    data = config.data
    _check_mixture(data)
    if not 0.0 <= data.validation < 1.0:
        raise ConfigError("data.validation", data.validation, "is a share of the documents, at least 0 and under 1", "use 0.01")
    if config.train.eval_steps and not data.validation:
        raise ConfigError("data.validation", data.validation, "validation needs held-out documents", "use 0.01, or train.eval_steps=0")
    for path in data.paths:
        _check_path(path)
    needed = _tokenizer_vocabulary(data.tokenizer)
    size = config.model.vocab_size
    if size is not None and size < needed:
        rule = f"is smaller than the {needed} tokens of data.tokenizer={data.tokenizer}"
        raise ConfigError("model.vocab_size", size, rule, "leave model.vocab_size=null, or use a larger one")
    return size if size is not None else needed


def _check_mixture(data: DataConfig) -> None:
    if not data.paths and not data.demo:
        raise ConfigError(
            "data.paths", [], "there is no data", "give data.paths=[prefix,...] (see `leantron data build`), or use data=demo"
        )
    if data.weights is None:
        return
    if len(data.weights) != len(data.paths):
        rule = f"there are {len(data.paths)} data.paths and {len(data.weights)} weights"
        raise ConfigError("data.weights", data.weights, rule, "give one weight a path, or null")
    if any(weight < 0 for weight in data.weights) or not sum(data.weights) > 0:
        raise ConfigError("data.weights", data.weights, "shares are not negative and not all 0", "use positive weights")


def _check_path(prefix: str) -> None:
    for suffix in (".idx", ".bin"):
        file = Path(f"{prefix}{suffix}")
        if not file.is_file():
            raise ConfigError("data.paths", prefix, f"{file} is not there", "build it with `leantron data build`, or correct the prefix")
        if file.stat().st_size == 0:
            raise ConfigError("data.paths", prefix, f"{file} is empty", "build it again with `leantron data build`")


def _tokenizer_vocabulary(name: str) -> int:
    if name == "byte":
        return 257
    from train.data.tokenizer import load_tokenizer

    try:
        return load_tokenizer(name).vocab_size
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(
            "data.tokenizer", name, f"cannot be loaded ({error})", "use byte, a tokenizer.json, or tiktoken:<encoding>"
        ) from error
