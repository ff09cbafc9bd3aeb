from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Optional as _Optional

DESCRIPTOR: _descriptor.FileDescriptor

class AgentsRequest(_message.Message):
    __slots__ = ("version", "content")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    CONTENT_FIELD_NUMBER: _ClassVar[int]
    version: str
    content: bytes
    def __init__(self, version: _Optional[str] = ..., content: _Optional[bytes] = ...) -> None: ...

class AgentsReply(_message.Message):
    __slots__ = ("content", "refusal")
    CONTENT_FIELD_NUMBER: _ClassVar[int]
    REFUSAL_FIELD_NUMBER: _ClassVar[int]
    content: bytes
    refusal: str
    def __init__(self, content: _Optional[bytes] = ..., refusal: _Optional[str] = ...) -> None: ...
