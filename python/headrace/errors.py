"""What can fail, by what the caller does about it."""

from __future__ import annotations


class Error(Exception):
    """A failure of Headrace. Fields are None where nothing is known.

    code: its name, such as "failed_precondition".
    engine, rank: the receiver at which it happened.
    sender: the sender concerned.
    phase: "hello", "open", "manifest", "transfer", "prepare" or "commit".
    bucket: sequence number of the bucket.
    name: of the tensor.
    expected, actual: as text.
    message: all of it as text.
    """

    headrace_code = "internal"

    def __init__(
        self,
        message: str = "",
        *,
        rank: int | None = None,
        phase: str | None = None,
        bucket: int | None = None,
        name: str | None = None,
        expected: str | None = None,
        actual: str | None = None,
        engine: str | None = None,
        sender: str | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.rank = rank
        self.phase = phase
        self.bucket = bucket
        self.name = name
        self.expected = expected
        self.actual = actual
        self.engine = engine
        self.sender = sender

    @property
    def code(self) -> str:
        return self.headrace_code

    def __reduce__(self):
        return _restore, (type(self), self.message, {k: v for k, v in self.__dict__.items() if k != "message"})


def _restore(kind: type[Error], message: str, fields: dict) -> Error:
    return kind(message, **fields)


class InvalidArgument(Error, ValueError):
    """The call or its input is wrong."""

    headrace_code = "invalid_argument"


class FailedPrecondition(Error):
    """Both sides must be brought to the same state first."""

    headrace_code = "failed_precondition"


class Corruption(Error):
    """Bytes are not what was sent: send again."""

    headrace_code = "corruption"


class DeadlineExceeded(Error, TimeoutError):
    """No progress in time: try again."""

    headrace_code = "deadline_exceeded"


class Unavailable(Error):
    """A peer is not there: connect again."""

    headrace_code = "unavailable"


class ResourceExhausted(Error):
    """Take less, or wait."""

    headrace_code = "resource_exhausted"


class Cancelled(Error):
    """Somebody gave it up."""

    headrace_code = "cancelled"


class Unsupported(Error):
    """Another way must be taken."""

    headrace_code = "unsupported"


class DeviceLost(Error):
    """The process must be started anew."""

    headrace_code = "device_lost"


class Internal(Error):
    """A bug of Headrace, or an exception of a hook."""

    headrace_code = "internal"


_BY_CODE = {kind.headrace_code: kind for kind in Error.__subclasses__()}


def make_error(code: str, message: str, rank, phase, bucket, name, expected, actual, engine, sender) -> Error:
    """The exception for a failure of the library below."""
    return _BY_CODE.get(code, Internal)(
        message, rank=rank, phase=phase, bucket=bucket, name=name, expected=expected, actual=actual, engine=engine, sender=sender
    )
