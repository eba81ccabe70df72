"""The one error that a user's configuration can cause: one line with key, value, rule and remedy."""


def show(value: object) -> str:
    """Return `value` as it would be written on the command line, on one line."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (list, tuple)):
        return "[" + ",".join(show(item) for item in value) + "]"
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{show(item)}" for key, item in value.items()) + "}"
    return " ".join(str(value).split())


class ConfigError(ValueError):
    """A value that cannot be run; renders as `key=value: rule; remedy` on one line."""

    def __init__(self, key: str, value: object, rule: str, remedy: str) -> None:
        self.key = key
        self.value = value
        self.rule = " ".join(rule.split())
        self.remedy = " ".join(remedy.split())
        super().__init__(f"{key}={show(value)}: {self.rule}; {self.remedy}")

    def __reduce__(self) -> tuple[type["ConfigError"], tuple[str, object, str, str]]:
        """Pickle by the four arguments: sweepers pass errors between processes."""
        return type(self), (self.key, self.value, self.rule, self.remedy)
