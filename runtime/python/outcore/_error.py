"""The one exception of outcore."""


class Error(Exception):
    """Why a call failed.

    kind: what went wrong, to match on, such as "budget_too_small" or "closed".
    message: names the thing and the limit. remedy: what can be done about it, or None.
    transient: whether the same call, unchanged, may succeed later.
    """

    def __init__(self, message: str, kind: str = "internal", remedy: str | None = None, transient: bool = False):
        super().__init__(message, kind, remedy, transient)
        self.message = message
        self.kind = kind
        self.remedy = remedy
        self.transient = transient

    def __str__(self) -> str:
        return self.message if self.remedy is None else f"{self.message} ({self.remedy})"
