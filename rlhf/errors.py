"""Errors that a user can act on."""


class UserError(Exception):
    """One line that names the parameter, file or server at fault, what is wrong with it, and what to do.

    A stage prints the message alone and exits with `exit_code`: never a traceback.
    """

    exit_code = 1


class UsageError(UserError):
    """The command line or the parameters are wrong: nothing was started."""

    exit_code = 2
