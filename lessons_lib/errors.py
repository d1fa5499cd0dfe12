"""Every error a learner can meet.

Two families, and nothing else:

* :class:`RefusedError` is a ``ValueError``: an argument was refused *before* anything was
  started or sent. It says what was asked, what was found and what to try. There is no run to look at.
* :class:`RunError` is a ``RuntimeError``: a run began. What ``run`` raises carries ``.run``, the record
  of what every rank had done until then, so that a failed run can be looked at like any other; also where
  ranks could not be started. So does a RefusedError that a rank raised: it is a RankError, too.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # pragma: no cover
    from lessons_lib.timeline import Waiting


class LessonsError(Exception):
    """Base of every error this library raises."""


class RefusedError(LessonsError, ValueError):
    """An argument was refused before anything was started or sent."""


class RunError(LessonsError, RuntimeError):
    """A run did not finish. ``run`` is the record of what its ranks had done until then."""

    run: Any = None

    def __init__(self, report: str) -> None:
        Exception.__init__(self, report)
        self.report = report

    def __str__(self) -> str:
        return self.report

    def add_report(self, text: str) -> None:
        self.report += text

    def _render_traceback_(self) -> list[str]:
        """Show the report alone in a notebook: the frames of the launcher help nobody.

        IPython calls this method, if an exception has it, in place of its own formatting.
        """
        return self.report.splitlines()


class RankError(RunError):
    """A rank raised. ``rank`` is its number, ``cause`` what it raised.

    What :func:`lessons_lib.run` raises is also an instance of the cause's own type, so that
    ``except ValueError`` around ``run`` works as it would around the function itself.
    """

    rank: int = -1
    cause: BaseException | None = None

    @classmethod
    def of(cls, rank: int, cause: BaseException, report: str) -> RankError:
        """Build the error for ``cause``, which ``rank`` raised; ``report`` is its message.

        >>> error = RankError.of(2, KeyError("lr"), "rank 2 raised KeyError: 'lr'")
        >>> isinstance(error, KeyError), isinstance(error, RunError), str(error)
        (True, True, "rank 2 raised KeyError: 'lr'")
        """
        error = cls(report)
        if isinstance(cause, Exception):
            with contextlib.suppress(Exception):  # some types cannot be combined with ours
                error = type(cls.__name__, (cls, type(cause)), {})(report)
        error.rank, error.cause = rank, cause
        return error


class PeerLostError(LessonsError, RuntimeError):
    """A communication broke off because the rank on the other side has gone. It is not the cause."""


class UnfinishedWarning(UserWarning):
    """Ranks began communications and left them: the numbers they were to bring are not there."""


class OrderWarning(UserWarning):
    """Ranks may have made calls in different orders that no error betrays: the numbers may be wrong."""


class DeadlockError(RunError):
    """No rank can go on. ``waiting`` says for every rank that stands still what it waits for."""

    waiting: tuple[Waiting, ...] = ()


class MismatchError(RunError):
    """The ranks of a group disagree about what they do together."""


class RunTimeoutError(RunError):
    """A run took longer than its ``timeout_s``."""
