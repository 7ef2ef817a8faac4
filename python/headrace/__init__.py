"""New weights into running inference engines, in place and proven byte for byte.

An engine has a Receiver in front of a StorageTable of its live tensors; a Layout says where checkpoint tensors land in them. A trainer has
a Sender. Tensors of torch, numpy and ml_dtypes, and whatever else has DLPack or a buffer, are taken without a copy, if they are in host
memory.
"""

from __future__ import annotations

from ._core import Bucket, Layout, StorageTable, __version__
from .errors import (
    Cancelled,
    Corruption,
    DeadlineExceeded,
    DeviceLost,
    Error,
    FailedPrecondition,
    Internal,
    InvalidArgument,
    ResourceExhausted,
    Unavailable,
    Unsupported,
)
from .receiver import Receiver
from .sender import Sender
from .views import View

TYPE_CHECKING = False
if TYPE_CHECKING:
    from .records import Fingerprint, Group, Hooks, Part, Phases, Receipt, ReceiverInfo, Report, Status, StorageSpec, TensorInfo

__all__ = [
    "Bucket",
    "Cancelled",
    "Corruption",
    "DeadlineExceeded",
    "DeviceLost",
    "Error",
    "FailedPrecondition",
    "Fingerprint",
    "Group",
    "Hooks",
    "Internal",
    "InvalidArgument",
    "Layout",
    "Part",
    "Phases",
    "Receipt",
    "Receiver",
    "ReceiverInfo",
    "Report",
    "ResourceExhausted",
    "Sender",
    "Status",
    "StorageSpec",
    "StorageTable",
    "TensorInfo",
    "Unavailable",
    "Unsupported",
    "View",
    "__version__",
]


if not TYPE_CHECKING:

    def __getattr__(name):
        """What headrace.records has, when it is first asked for: importing dataclasses takes longer than all the rest."""
        if name in __all__ or name == "records":
            import importlib

            records = importlib.import_module(".records", __name__)
            return globals().setdefault(name, records if name == "records" else getattr(records, name))
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

    def __dir__():
        return sorted({*globals(), *__all__})
