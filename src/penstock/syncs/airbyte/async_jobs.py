"""The jobs that a manifest has an API do (`AsyncRetriever`): a part of `worker`.

Where a request about a job fails, airbyte-cdk asks again at once, for as long as the job may take, and
reports at the end alone that something was wrong. Here that request ends the read.
"""

from typing import Any, Final

import requests
from airbyte_cdk.sources.declarative.async_job.job_orchestrator import (
    AsyncJobOrchestrator,
    AsyncPartition,
)
from airbyte_cdk.sources.declarative.async_job.status import AsyncJobStatus
from airbyte_cdk.sources.declarative.requesters.http_job_repository import AsyncHttpJobRepository

_ALL_FAILED: Final = "One or more async jobs failed"
_BAD: Final = (AsyncJobStatus.FAILED, AsyncJobStatus.TIMED_OUT)
_status_of: Final = AsyncHttpJobRepository._get_validated_job_status
_give_up: Final = AsyncJobOrchestrator._process_partitions_with_errors
_wait: Final = AsyncJobOrchestrator._wait_on_status_update

_given_up: Final[list[tuple[str, bool]]] = []
"""The parts of the order whose jobs have failed, and whether they did not end in time."""
_answer = ""
"""What the API has answered of the last job that failed."""
_is_ending = False
_is_checking = False


class CreatedError(BaseException):
    """A check has had a job made: the login is right. No `except Exception` of a library keeps it."""


def install() -> None:
    """Have the jobs of all orders be done as here."""
    AsyncJobOrchestrator._is_breaking_exception = _breaks  # for all of the process
    AsyncJobOrchestrator._process_partitions_with_errors = _note
    AsyncJobOrchestrator._wait_on_status_update = _wait_for_jobs
    AsyncHttpJobRepository._get_validated_job_status = _status


def begin(*, is_check: bool) -> None:
    """Begin an order; a check waits for no job."""
    global _answer, _is_ending, _is_checking
    _given_up.clear()
    _answer, _is_ending, _is_checking = "", False, is_check


def is_ending() -> bool:
    """Whether a request has failed: those that follow abort jobs, and change nothing of the reason."""
    return _is_ending


def failure(text: str) -> tuple[str, str, str] | None:
    """Return the code, text and remedy of jobs that have failed; None: another error ends the order."""
    if not _given_up or not text.startswith(_ALL_FAILED):
        return None
    parts = ", ".join(name for name, _ in _given_up[:3])
    more = f" and {len(_given_up) - 3:,} more" if len(_given_up) > 3 else ""
    which = f"The API's job for {parts}{more}"
    if all(is_late for _, is_late in _given_up):
        return (
            "timed_out",
            f"{which} was not done in time in any of its tries.",
            "Penstock has another one made later. Where jobs take longer, raise polling_job_timeout of"
            " the stream in the manifest (minutes; 60 where it has none).",
        )
    return (
        "unavailable",
        f"{which} failed in each of its tries{f': {_answer}' if _answer else ''}.",
        "See in the API why it fails. Penstock has another one made later.",
    )


def _breaks(_self: Any, _error: Exception) -> bool:
    global _is_ending
    _is_ending = True
    return True


def _note(self: AsyncJobOrchestrator, partition: AsyncPartition) -> None:
    of = ", ".join(f"{name} {value}" for name, value in partition.stream_slice.items())
    late = AsyncJobStatus.TIMED_OUT in {job.status() for job in partition.jobs}
    _given_up.append((of or "all of the stream", late))
    _give_up(self, partition)


def _wait_for_jobs(self: AsyncJobOrchestrator) -> None:
    global _is_ending
    if _is_checking:
        _is_ending = True
        self._abort_all_running_jobs()
        raise CreatedError
    # Behind the last job there is nothing to wait for.
    if self._running_partitions or self._job_tracker._has_reached_limit():
        _wait(self)


def _status(self: AsyncHttpJobRepository, response: requests.Response) -> AsyncJobStatus:
    global _answer
    found = _status_of(self, response)
    if found in _BAD:
        _answer = " ".join(response.text.split())[:300]
    return found
