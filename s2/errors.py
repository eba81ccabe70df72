"""The one error of the package for bad input: a line with the key, its value, the rule and the remedy."""


class S2Error(ValueError):
    """A value that breaks a rule of the attention interface.

    The parts stay available as attributes, so that a caller can name its own key (`attention.stride` for `stride`).
    """

    def __init__(self, key: str, value: object = None, rule: str | None = None, remedy: str | None = None) -> None:
        """`key` alone is a finished message: what pickling, and callers that put a prefix on an exception, construct."""
        super().__init__(key if rule is None else f"{key}={value}: {rule}; {remedy}")
        self.key, self.value, self.rule, self.remedy = key, value, rule, remedy
