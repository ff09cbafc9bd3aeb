from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class OpenRequest(_message.Message):
    __slots__ = ("job", "generation", "from_rank", "to_rank", "lanes", "connections", "checks_payloads", "wire_version")
    JOB_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    FROM_RANK_FIELD_NUMBER: _ClassVar[int]
    TO_RANK_FIELD_NUMBER: _ClassVar[int]
    LANES_FIELD_NUMBER: _ClassVar[int]
    CONNECTIONS_FIELD_NUMBER: _ClassVar[int]
    CHECKS_PAYLOADS_FIELD_NUMBER: _ClassVar[int]
    WIRE_VERSION_FIELD_NUMBER: _ClassVar[int]
    job: str
    generation: int
    from_rank: int
    to_rank: int
    lanes: _containers.RepeatedScalarFieldContainer[str]
    connections: int
    checks_payloads: bool
    wire_version: int
    def __init__(self, job: _Optional[str] = ..., generation: _Optional[int] = ..., from_rank: _Optional[int] = ..., to_rank: _Optional[int] = ..., lanes: _Optional[_Iterable[str]] = ..., connections: _Optional[int] = ..., checks_payloads: _Optional[bool] = ..., wire_version: _Optional[int] = ...) -> None: ...

class OpenReply(_message.Message):
    __slots__ = ("accepted", "deferred", "not_ready", "refused")
    class Accepted(_message.Message):
        __slots__ = ("lanes", "token", "addresses", "connections", "checks_payloads", "wire_version")
        class AddressesEntry(_message.Message):
            __slots__ = ("key", "value")
            KEY_FIELD_NUMBER: _ClassVar[int]
            VALUE_FIELD_NUMBER: _ClassVar[int]
            key: str
            value: str
            def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
        LANES_FIELD_NUMBER: _ClassVar[int]
        TOKEN_FIELD_NUMBER: _ClassVar[int]
        ADDRESSES_FIELD_NUMBER: _ClassVar[int]
        CONNECTIONS_FIELD_NUMBER: _ClassVar[int]
        CHECKS_PAYLOADS_FIELD_NUMBER: _ClassVar[int]
        WIRE_VERSION_FIELD_NUMBER: _ClassVar[int]
        lanes: _containers.RepeatedScalarFieldContainer[str]
        token: bytes
        addresses: _containers.ScalarMap[str, str]
        connections: int
        checks_payloads: bool
        wire_version: int
        def __init__(self, lanes: _Optional[_Iterable[str]] = ..., token: _Optional[bytes] = ..., addresses: _Optional[_Mapping[str, str]] = ..., connections: _Optional[int] = ..., checks_payloads: _Optional[bool] = ..., wire_version: _Optional[int] = ...) -> None: ...
    class Deferred(_message.Message):
        __slots__ = ()
        def __init__(self) -> None: ...
    class NotReady(_message.Message):
        __slots__ = ()
        def __init__(self) -> None: ...
    class Refused(_message.Message):
        __slots__ = ("reason", "message")
        class Reason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
            __slots__ = ()
            REASON_UNSPECIFIED: _ClassVar[OpenReply.Refused.Reason]
            WRONG_WORLD: _ClassVar[OpenReply.Refused.Reason]
            STALE_GENERATION: _ClassVar[OpenReply.Refused.Reason]
            NO_COMMON_LANE: _ClassVar[OpenReply.Refused.Reason]
            LOST: _ClassVar[OpenReply.Refused.Reason]
        REASON_UNSPECIFIED: OpenReply.Refused.Reason
        WRONG_WORLD: OpenReply.Refused.Reason
        STALE_GENERATION: OpenReply.Refused.Reason
        NO_COMMON_LANE: OpenReply.Refused.Reason
        LOST: OpenReply.Refused.Reason
        REASON_FIELD_NUMBER: _ClassVar[int]
        MESSAGE_FIELD_NUMBER: _ClassVar[int]
        reason: OpenReply.Refused.Reason
        message: str
        def __init__(self, reason: _Optional[_Union[OpenReply.Refused.Reason, str]] = ..., message: _Optional[str] = ...) -> None: ...
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    DEFERRED_FIELD_NUMBER: _ClassVar[int]
    NOT_READY_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    accepted: OpenReply.Accepted
    deferred: OpenReply.Deferred
    not_ready: OpenReply.NotReady
    refused: OpenReply.Refused
    def __init__(self, accepted: _Optional[_Union[OpenReply.Accepted, _Mapping]] = ..., deferred: _Optional[_Union[OpenReply.Deferred, _Mapping]] = ..., not_ready: _Optional[_Union[OpenReply.NotReady, _Mapping]] = ..., refused: _Optional[_Union[OpenReply.Refused, _Mapping]] = ...) -> None: ...

class WithdrawRequest(_message.Message):
    __slots__ = ("token", "cause")
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    CAUSE_FIELD_NUMBER: _ClassVar[int]
    token: bytes
    cause: str
    def __init__(self, token: _Optional[bytes] = ..., cause: _Optional[str] = ...) -> None: ...

class WithdrawReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...
