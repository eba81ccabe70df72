"""The data of a run before it starts: mixture, split, files that are whole and of this tokenizer, and the vocabulary that it needs."""

from train.config.errors import ConfigError
from train.config.schema import Config
from train.data.config import DataConfig
from train.data.errors import DataError
from train.data.indexed import IndexedFile
from train.data.manifest import Manifest
from train.data.tokenizer import Tokenizer, load_tokenizer


def check_data(config: Config) -> int:
    """Return the model's vocabulary size. Raises ConfigError for data that is missing, damaged or of another tokenizer.

    Reads the indices, not the tokens; the demo's corpus is built later, by the run.
    """
    data = config.data
    _check_mixture(data)
    if not 0.0 <= data.validation < 1.0:
        raise ConfigError("data.validation", data.validation, "is a share of the documents, at least 0 and under 1", "use 0.01")
    if config.train.eval_steps and not data.validation:
        raise ConfigError("data.validation", data.validation, "validation needs held-out documents", "use 0.01, or train.eval_steps=0")
    tokenizer = load_tokenizer(data.tokenizer)
    for prefix in data.paths:
        _check_files(prefix, tokenizer, data.validation)
    needed, size = tokenizer.vocab_size, config.model.vocab_size
    if size is not None and size < needed:
        rule = f"is smaller than the {needed} tokens of data.tokenizer={data.tokenizer}"
        raise ConfigError("model.vocab_size", size, rule, "leave model.vocab_size=null, or use a larger one")
    return size if size is not None else needed


def _check_mixture(data: DataConfig) -> None:
    if not data.paths and not data.demo:
        remedy = "give data.paths=[prefix,...] (see `leantron data build`), or use data=demo"
        raise ConfigError("data.paths", [], "there is no data", remedy)
    if data.weights is None:
        return
    if len(data.weights) != len(data.paths):
        rule = f"there are {len(data.paths)} data.paths and {len(data.weights)} weights"
        raise ConfigError("data.weights", data.weights, rule, "give one weight a path, or null")
    if any(weight < 0 for weight in data.weights) or not sum(data.weights) > 0:
        raise ConfigError("data.weights", data.weights, "shares are not negative and not all 0", "use positive weights")


def _check_files(prefix: str, tokenizer: Tokenizer, validation: float) -> None:
    try:
        file = IndexedFile(prefix)
        manifest = Manifest.read(prefix)
        if manifest is not None:
            manifest.check_tokenizer(prefix, tokenizer.name, tokenizer.vocab_size)
            manifest.check_files(prefix, len(file), file.total_tokens)
    except DataError as error:
        rule = f"expected {error.expected} at {error.path}, found {error.found}"
        raise ConfigError("data.paths", prefix, rule, error.remedy) from error
    if validation and len(file) < 2:
        rule = f"has {len(file)} document, and training and validation need one each"
        raise ConfigError("data.paths", prefix, rule, "build it from more documents, or use data.validation=0 train.eval_steps=0")
