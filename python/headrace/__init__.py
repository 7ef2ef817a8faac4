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
from .receiver import Hooks, Receiver
from .records import Fingerprint, Group, Phases, Receipt, ReceiverInfo, Report, Status, StorageSpec, TensorInfo
from .sender import Part, Sender
from .views import View

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
