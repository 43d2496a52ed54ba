"""The one exception that a user is meant to read."""


class UserError(ValueError):
    """Bad input, told in one line that names the culprit and the remedy.

    Command-line entry points print ``error: <message>`` and exit with code 2 instead of
    showing a traceback; in Python it is an ordinary ``ValueError``.
    """
