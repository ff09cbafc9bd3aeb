from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Optional as _Optional

DESCRIPTOR: _descriptor.FileDescriptor

class EnterRequest(_message.Message):
    __slots__ = ("version", "node", "name", "address", "is_witness", "known")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    NODE_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    IS_WITNESS_FIELD_NUMBER: _ClassVar[int]
    KNOWN_FIELD_NUMBER: _ClassVar[int]
    version: str
    node: str
    name: str
    address: str
    is_witness: bool
    known: bytes
    def __init__(self, version: _Optional[str] = ..., node: _Optional[str] = ..., name: _Optional[str] = ..., address: _Optional[str] = ..., is_witness: _Optional[bool] = ..., known: _Optional[bytes] = ...) -> None: ...

class EnterReply(_message.Message):
    __slots__ = ("entry", "leader_address", "refusal", "is_passing")
    ENTRY_FIELD_NUMBER: _ClassVar[int]
    LEADER_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    REFUSAL_FIELD_NUMBER: _ClassVar[int]
    IS_PASSING_FIELD_NUMBER: _ClassVar[int]
    entry: bytes
    leader_address: str
    refusal: str
    is_passing: bool
    def __init__(self, entry: _Optional[bytes] = ..., leader_address: _Optional[str] = ..., refusal: _Optional[str] = ..., is_passing: _Optional[bool] = ...) -> None: ...

class GroupFrame(_message.Message):
    __slots__ = ("sender", "sender_address", "receiver", "content")
    SENDER_FIELD_NUMBER: _ClassVar[int]
    SENDER_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    RECEIVER_FIELD_NUMBER: _ClassVar[int]
    CONTENT_FIELD_NUMBER: _ClassVar[int]
    sender: str
    sender_address: str
    receiver: str
    content: bytes
    def __init__(self, sender: _Optional[str] = ..., sender_address: _Optional[str] = ..., receiver: _Optional[str] = ..., content: _Optional[bytes] = ...) -> None: ...

class ExchangeReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...
