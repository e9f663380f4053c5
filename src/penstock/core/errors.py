"""The errors that people see. Each states what is wrong, with which value, and what to do about it.

    PenstockError           code, message, remedy, transient; ends a command with `exit_code`
      ConfigError           the configuration can't be used: one problem a line
      CaptureError          a source cannot go on; `is_gap`: changes may be missed
        SetupError          the server, its publication or its slot is not ready
          InstallError      the schema `tide` can't be installed or read (`outbox.errors`)
        BackfillError       a backfill, or one of its ranges, cannot go on
      PipelineError         an outbox's pipeline has a configuration that can't be used
      SinkError             a sink cannot go on
      BastionError          a bastion, or a server behind it, cannot be reached
      TargetError           a target cannot be reached: a NATS cluster or an HTTP endpoint
      StoreError            the store cannot do its work
      StateMoved            the desired state is another than a change was made for (`desired.state`)
      PlanFileError         a saved plan can't be used (`desired.plan`)
      SyncError             an API cannot be read (`syncs.errors`)
      ConsumerError         a consumer cannot serve a request (`streams.consumers.types`)
        UnknownConsumer     there is none of that name
        UnknownStream       there is no stream of that name
        UnknownDeadLetter   the consumer has no dead letter of that number
        NameTaken           another consumer or a stream has the name
        WrongSetting        a setting does not go with the stream
        Refused             the request makes no sense for this consumer
        TooManyWaiting      as many receives wait as are allowed
        StoreUnavailable    the store did not answer
      TrialError            a trial can't be made (`trial.apart`)
      UnsupportedError      a sink in memory has what only Spark evaluates (`testing.sink`)
      DemoError             the demo cannot go on (`demo.errors`)
      EmbeddedError         an embedded server cannot start
        PortTakenError      its one port is in use
      ListenError           the address can't be listened on
      SparkError            there is no Spark session

`code` is a stable word for logs, metrics and tests (`connection_refused`, `slot_invalidated`, …);
`remedy` is a command, a statement or a setting; `transient` is whether trying again can help by itself;
`concerns` is the entity at fault, where it is one.
No secret stands in any of them. `core.health.Failure` is what is stored of one: it has a time.

Errors of one message or one expression are values on their way to a dead letter or into one of the
errors above, and stay in their rooms: `ExpressionError`, `TransformError`, `MessageError`,
`EndpointError`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple, Self


class Concern(NamedTuple):
    """The entity that an error concerns, and the path of the setting where there is one."""

    kind: str
    name: str
    path: str = ""

    def __str__(self) -> str:
        return f"{self.kind} {self.name}: {self.path}" if self.path else f"{self.kind} {self.name}"


class Mistake(NamedTuple):
    """What is wrong with an entity, and why."""

    concerns: Concern
    reason: str

    def __str__(self) -> str:
        return f"{self.concerns}: {self.reason}"


class PenstockError(Exception):
    """An error whose text is complete: a command prints it and ends with `exit_code`."""

    exit_code: ClassVar[int] = 1

    def __init__(
        self,
        code: str,
        message: str,
        *,
        remedy: str = "",
        transient: bool = False,
        concerns: Concern | None = None,
    ) -> None:
        super().__init__(f"{message} {remedy}".strip())
        self.code = code
        self.message = message
        self.remedy = remedy
        self.transient = transient
        self.concerns = concerns

    def _state(self) -> dict[str, Any]:
        """Return the keyword arguments that make an equal error."""
        state = {"remedy": self.remedy, "transient": self.transient}
        return state if self.concerns is None else state | {"concerns": self.concerns}

    def __reduce__(self) -> tuple[Any, ...]:
        # Spark carries errors between processes by pickling them; keyword arguments need help.
        return _rebuild, (type(self), self.code, self.message, self._state())


def _rebuild(
    cls: type[PenstockError], code: str, message: str, state: dict[str, Any]
) -> PenstockError:
    return cls(code, message, **state)


class ConfigError(PenstockError):
    """A configuration that cannot be used, for `mistakes`."""

    exit_code = 2

    def __init__(self, mistakes: Sequence[str | Mistake]) -> None:
        self.mistakes = list(mistakes)
        super().__init__("invalid_config", "\n".join(self.problems))

    @property
    def problems(self) -> list[str]:
        """A line of text for each mistake."""
        return list(map(str, self.mistakes))

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.mistakes,)


class CaptureError(PenstockError):
    """A source cannot go on. `is_gap`: changes may be missed, and it needs `penstock recover`."""

    def __init__(
        self,
        code: str,
        message: str,
        *,
        remedy: str = "",
        transient: bool = False,
        is_gap: bool = False,
        concerns: Concern | None = None,
    ) -> None:
        super().__init__(code, message, remedy=remedy, transient=transient, concerns=concerns)
        self.is_gap = is_gap

    def _state(self) -> dict[str, Any]:
        return super()._state() | {"is_gap": self.is_gap}

    def recovered_by(self, command: str | None) -> Self:
        """Return the error with the command that recovers its source as the remedy of a gap."""
        if not self.is_gap or command is None:
            return self
        return type(self)(self.code, self.message, remedy=recovery_remedy(command), is_gap=True)


def recovery_remedy(command: str) -> str:
    """Return what to do about a gap; the command stands at the end, ready to paste."""
    return (
        "Stop `penstock run` if it still runs, and recover the source: that creates slot and "
        f"publication again, reports what was missed and offers a backfill. Run: {command}"
    )


class SetupError(CaptureError):
    """The server, its publication or its slot is not ready for a capture."""


class BackfillError(CaptureError):
    """A backfill, or one of its ranges, cannot go on.

    `transient`: the chunk may be read again as it is (the connection or the snapshot was lost).
    """


class PipelineError(PenstockError):
    """A config that can't be used; stops its pipeline alone.

    `code` is `invalid_config` or `unresolved_reference`; `problems` has a line for each mistake.
    """

    def __init__(self, code: str, problems: list[str], remedy: str) -> None:
        super().__init__(code, "; ".join(problems) + ".", remedy=remedy)
        self.problems = problems

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.code, self.problems, self.remedy)


class SinkError(PenstockError):
    """A sink cannot go on."""

    def __init__(
        self, code: str, message: str, *, remedy: str = "", transient: bool = True
    ) -> None:
        super().__init__(code, message, remedy=remedy, transient=transient)


class BastionError(PenstockError):
    """A bastion can't be used, or, with the code `unreachable`, a server can't be reached from it.

    Sources raise it as a `SetupError`, sinks as a `SinkError`, with the same code and text.
    """


class TargetError(PenstockError):
    """A target can't be reached; a code that begins with `bastion_` is its bastion's trouble."""


class StoreError(PenstockError):
    """The store cannot do its work."""


class EmbeddedError(PenstockError):
    """An embedded server cannot start: its own words, and where its whole log is."""

    def __init__(self, message: str, code: str = "embedded_server", remedy: str = "") -> None:
        super().__init__(code, message, remedy=remedy)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.message, self.code, self.remedy)


class PortTakenError(EmbeddedError):
    """The one port that a server has to listen on is in use by another program."""


class ListenError(PenstockError):
    """The address can't be listened on."""

    def __init__(self, message: str) -> None:
        super().__init__("listen", message)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.message,)


class SparkError(PenstockError):
    """There is no Spark session, or a process of Spark's is gone."""
