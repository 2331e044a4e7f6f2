"""The one exception that wrong input raises."""

from collections.abc import Iterable


class InputError(Exception):
    """Wrong input: one line per problem, each saying where, what, and what would be right.

    The command line prints every line and exits with 2; nothing else in infersim is raised on purpose at a user.
    """

    def __init__(self, problems: str | Iterable[str]):
        self.problems: tuple[str, ...] = (problems,) if isinstance(problems, str) else tuple(problems)
        super().__init__("\n".join(self.problems))
