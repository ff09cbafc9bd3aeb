from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Optional as _Optional

DESCRIPTOR: _descriptor.FileDescriptor

class PositionRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class PositionReply(_message.Message):
    __slots__ = ("step",)
    STEP_FIELD_NUMBER: _ClassVar[int]
    step: int
    def __init__(self, step: _Optional[int] = ...) -> None: ...

class PinRequest(_message.Message):
    __slots__ = ("step",)
    STEP_FIELD_NUMBER: _ClassVar[int]
    step: int
    def __init__(self, step: _Optional[int] = ...) -> None: ...

class PinReply(_message.Message):
    __slots__ = ("pin", "description")
    PIN_FIELD_NUMBER: _ClassVar[int]
    DESCRIPTION_FIELD_NUMBER: _ClassVar[int]
    pin: int
    description: bytes
    def __init__(self, pin: _Optional[int] = ..., description: _Optional[bytes] = ...) -> None: ...

class BlockRequest(_message.Message):
    __slots__ = ("pin", "name", "number")
    PIN_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    pin: int
    name: str
    number: int
    def __init__(self, pin: _Optional[int] = ..., name: _Optional[str] = ..., number: _Optional[int] = ...) -> None: ...

class UpdateRequest(_message.Message):
    __slots__ = ("pin", "number")
    PIN_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    pin: int
    number: int
    def __init__(self, pin: _Optional[int] = ..., number: _Optional[int] = ...) -> None: ...

class UnpinRequest(_message.Message):
    __slots__ = ("pin",)
    PIN_FIELD_NUMBER: _ClassVar[int]
    pin: int
    def __init__(self, pin: _Optional[int] = ...) -> None: ...

class UnpinReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...
